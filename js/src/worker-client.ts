/** The page's side of training in a Web Worker. */

import { ArgumentError, revived, WorkerError } from "./errors.js";
import type { FitOptions, ProgressEvent } from "./fit.js";
import type { FitData } from "./fit-data.js";
import type { HeadFit, HeadOptions } from "./heads.js";
import type { History } from "./history.js";
import type { Feeds } from "./inputs.js";
import type { Tensors } from "./graph.js";
import type { OrtTensor } from "./runtime.js";
import type { StepResult, TrainingSession } from "./session.js";
import {
  type Call,
  METHODS,
  type PlainTensor,
  type Reply,
  type WorkerFitOptions,
  type WorkerOptions,
} from "./worker-messages.js";

export type { PlainTensor, WorkerFitOptions, WorkerOptions } from "./worker-messages.js";

/** The part of a worker that is needed. */
export interface WorkerLike {
  postMessage(message: unknown): void;
  terminate(): void;
  addEventListener(type: string, listener: (event: any) => void): void;
}

/** The result of a step in a worker. */
export interface WorkerStepResult {
  readonly loss: number;
  readonly outputs: Readonly<Record<string, PlainTensor>>;
}

interface Pending {
  resolve(value: never): void;
  reject(error: Error): void;
  progress?: ((event: ProgressEvent) => void) | undefined;
}

/** Make a session in a worker that called `serve`. */
export async function connect(worker: WorkerLike, options: WorkerOptions): Promise<WorkerSession> {
  const link = new Link(worker);
  const names = await link.call<SessionNames>("create", [options]);
  return new WorkerSession(link, names);
}

interface SessionNames {
  readonly lossName: string;
  readonly trainingInputNames: readonly string[];
  readonly trainingOutputNames: readonly string[];
  readonly evalInputNames: readonly string[];
  readonly evalOutputNames: readonly string[];
}

/** A method of `TrainingSession` in a worker: it returns a promise of plain tensors. */
type Remote<F> = F extends (...args: infer A) => infer R ? (...args: A) => Promise<Posted<Awaited<R>>> : never;
type Posted<T> = T extends OrtTensor
  ? PlainTensor
  : T extends Tensors
    ? Record<string, PlainTensor>
    : T extends StepResult
      ? WorkerStepResult
      : T;
type RemoteMethods = {
  [M in Exclude<(typeof METHODS)[number], "runTrainStep" | "runEvalStep">]: Remote<TrainingSession[M]>;
};

// Those of the session, which is there, are added below.
export interface WorkerSession extends RemoteMethods {
  runTrainStep(feeds: Feeds): Promise<Record<string, PlainTensor>>;
  runEvalStep(feeds: Feeds): Promise<Record<string, PlainTensor>>;
  /** Set the seed of all randomness in training from now on. */
  setSeed(seed: number | bigint): Promise<void>;
  /** The mean loss (`evalLoss`) and metrics over data. */
  evaluateData(
    data: FitData,
    options?: Pick<WorkerFitOptions, "batchSize" | "metrics">,
  ): Promise<Record<string, number>>;
  /** Compute the last layer from the features of samples; see `fitHead`. */
  fitHead(data: FitData, options?: HeadOptions): Promise<HeadFit>;
}

/** A `TrainingSession` that is in a worker. */
export class WorkerSession {
  private readonly _link: Link;

  /** @internal */
  constructor(
    link: Link,
    /** The names of the loss, of inputs and of outputs. */
    readonly names: SessionNames,
  ) {
    this._link = link;
    for (const method of [...METHODS, "setSeed", "evaluateData", "fitHead"] as const) {
      this[method] = (...args: unknown[]): Promise<never> => link.call(method, args);
    }
  }

  /**
   * Train in the worker; see `fit`. The worker stores checkpoints in the store that
   * `options.store` names.
   */
  fit(
    data: FitData,
    options: WorkerFitOptions & Pick<FitOptions, "onProgress" | "signal"> = {},
  ): Promise<History> {
    const { onProgress, signal, ...rest } = options;
    return this._link.call("fit", [data, rest], onProgress, signal);
  }

  /** Terminate the worker; pending calls are rejected. */
  terminate(): void {
    this._link.end("the worker was ended by terminate()");
  }
}

class Link {
  private readonly _pending = new Map<number, Pending>();
  private _waiting: Call[] | null = [];
  private _ended: string | null = null;
  private _last = 0;

  constructor(private readonly _worker: WorkerLike) {
    if (typeof _worker?.postMessage !== "function") {
      throw new ArgumentError("a worker is needed: new Worker(url, { type: 'module' })");
    }
    _worker.addEventListener("message", (event: MessageEvent) => this._hear(event.data as Reply));
    _worker.addEventListener("error", (event: ErrorEvent) =>
      this.end(
        `the worker failed: ${event.message || "its script could not be loaded"}. What it has saved ` +
          "is still there: make a new worker and go on from that",
      ),
    );
    _worker.addEventListener("messageerror", () =>
      this.end("an answer of the worker could not be read"),
    );
    // It may have announced that it is ready before we listened.
    _worker.postMessage({ onnxtrain: "hello" });
  }

  private _hear(reply: Reply): void {
    if (reply?.onnxtrain === "ready") this._begin();
    else if (reply?.onnxtrain === "holding") this._waitForEnd(reply.lock);
    else if (reply && "id" in reply) this._settle(reply);
  }

  private _settle(reply: Extract<Reply, { readonly id: number }>): void {
    const pending = this._pending.get(reply.id);
    if (!pending) return;
    if (reply.onnxtrain === "progress") {
      pending.progress?.(reply.event);
      return;
    }
    this._pending.delete(reply.id);
    if (reply.onnxtrain === "result") pending.resolve(reply.value as never);
    else pending.reject(revived(reply.name, reply.message));
  }

  /** The worker is ready; earlier messages would have been lost. */
  private _begin(): void {
    const { _waiting: waiting } = this;
    if (!waiting) return;
    this._waiting = null;
    if (locksOf()) {
      const lock = `onnxtrain-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
      this._post({ onnxtrain: "hold", lock });
    }
    for (const call of waiting) this._post(call);
  }

  /**
   * The worker holds a lock as long as it lives. Nothing else tells a page that the browser
   * killed it, for example out of memory.
   */
  private _waitForEnd(lock: string): void {
    void locksOf()?.request(lock, () => {
      this.end(
        "the worker has ended: the browser may have been short of memory. What it has saved is " +
          "still there: make a new worker and go on from that",
      );
    });
  }

  private _post(call: Call): void {
    try {
      this._worker.postMessage(call);
    } catch (error) {
      if (!("id" in call)) return;
      const pending = this._pending.get(call.id);
      this._pending.delete(call.id);
      pending?.reject(
        new ArgumentError(`this cannot be sent to a worker: ${(error as Error).message}`),
      );
    }
  }

  call<T>(
    method: string,
    args: readonly unknown[],
    progress?: (event: ProgressEvent) => void,
    signal?: AbortSignal,
  ): Promise<T> {
    if (this._ended !== null) return Promise.reject(new WorkerError(this._ended));
    this._last += 1;
    const id = this._last;
    const call: Call = { onnxtrain: "call", id, method, args: args.map(sendable) };
    return new Promise<T>((resolve, reject) => {
      this._pending.set(id, { resolve, reject, progress });
      const abort = (): void => {
        if (this._waiting) this._waiting.push({ onnxtrain: "abort", id });
        else this._post({ onnxtrain: "abort", id });
      };
      if (this._waiting) this._waiting.push(call);
      else this._post(call);
      if (signal?.aborted) abort();
      else signal?.addEventListener("abort", abort, { once: true });
    });
  }

  end(reason: string): void {
    if (this._ended !== null) return;
    this._ended = reason;
    this._worker.terminate();
    for (const pending of this._pending.values()) pending.reject(new WorkerError(reason));
    this._pending.clear();
  }
}

function locksOf(): LockManager | undefined {
  return (globalThis as { navigator?: { locks?: LockManager } }).navigator?.locks;
}

/** onnxruntime's tensors have methods and cannot be posted; their contents can. */
function sendable(value: unknown): unknown {
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return value;
  if (Array.isArray(value))
    return value.every((item) => typeof item !== "object") ? value : value.map(sendable);
  if ("dims" in value && "data" in value) {
    const { dims, data } = value as PlainTensor;
    return { dims: [...dims], data };
  }
  if (Object.getPrototypeOf(value) !== Object.prototype) return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, sendable(item)]));
}
