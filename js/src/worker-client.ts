/** The page's side of training in a Web Worker. */

import { ArgumentError, revived, WorkerError } from "./errors.js";
import type { FitOptions, ProgressEvent } from "./fit.js";
import type { FitData } from "./fit-data.js";
import type { History } from "./fit-place.js";
import type { Feeds } from "./inputs.js";
import type { Property } from "./parameters.js";
import type { TypedArray } from "./runtime.js";
import type {
  Call,
  PlainTensor,
  Reply,
  WorkerFitOptions,
  WorkerOptions,
} from "./worker-messages.js";

export type { PlainTensor, WorkerFitOptions, WorkerOptions } from "./worker-messages.js";

/** What is needed of a worker. */
export interface WorkerLike {
  postMessage(message: unknown): void;
  terminate(): void;
  addEventListener(type: string, listener: (event: any) => void): void;
}

/** What a step comes to in a worker. */
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

/** A `TrainingSession` that is in a worker. */
export class WorkerSession {
  /** @internal */
  constructor(
    private readonly link: Link,
    /** The names of the loss, of inputs and of outputs. */
    readonly names: SessionNames,
  ) {}

  step(feeds: Feeds): Promise<WorkerStepResult> {
    return this.link.call("step", [feeds]);
  }

  evaluate(feeds: Feeds): Promise<WorkerStepResult> {
    return this.link.call("evaluate", [feeds]);
  }

  runTrainStep(feeds: Feeds): Promise<Record<string, PlainTensor>> {
    return this.link.call("runTrainStep", [feeds]);
  }

  runEvalStep(feeds: Feeds): Promise<Record<string, PlainTensor>> {
    return this.link.call("runEvalStep", [feeds]);
  }

  runOptimizerStep(): Promise<void> {
    return this.link.call("runOptimizerStep", []);
  }

  lazyResetGrad(): Promise<void> {
    return this.link.call("lazyResetGrad", []);
  }

  /**
   * Train in the worker; see `fit`. Checkpoints are kept by the worker, in the store that
   * `options.store` names.
   */
  fit(
    data: FitData,
    options: WorkerFitOptions & Pick<FitOptions, "onProgress" | "signal"> = {},
  ): Promise<History> {
    const { onProgress, signal, ...rest } = options;
    return this.link.call("fit", [data, rest], onProgress, signal);
  }

  /** The mean loss (`evalLoss`) and metrics over data. */
  evaluateData(
    data: FitData,
    options: Pick<WorkerFitOptions, "batchSize" | "metrics"> = {},
  ): Promise<Record<string, number>> {
    return this.link.call("evaluateData", [data, options]);
  }

  setLearningRate(learningRate: number): Promise<void> {
    return this.link.call("setLearningRate", [learningRate]);
  }

  getLearningRate(): Promise<number> {
    return this.link.call("getLearningRate", []);
  }

  registerLinearLRScheduler(warmup: number, total: number, initialLr: number): Promise<void> {
    return this.link.call("registerLinearLRScheduler", [warmup, total, initialLr]);
  }

  schedulerStep(metric?: number): Promise<void> {
    return this.link.call("schedulerStep", [metric]);
  }

  getParametersSize(trainableOnly = true): Promise<number> {
    return this.link.call("getParametersSize", [trainableOnly]);
  }

  getContiguousParameters(trainableOnly = true): Promise<PlainTensor> {
    return this.link.call("getContiguousParameters", [trainableOnly]);
  }

  loadParametersBuffer(buffer: Uint8Array | Float32Array, trainableOnly = true): Promise<void> {
    return this.link.call("loadParametersBuffer", [buffer, trainableOnly]);
  }

  getParameter(name: string): Promise<TypedArray> {
    return this.link.call("getParameter", [name]);
  }

  updateParameter(name: string, values: TypedArray): Promise<void> {
    return this.link.call("updateParameter", [name, values]);
  }

  addProperty(name: string, value: Property): Promise<void> {
    return this.link.call("addProperty", [name, value]);
  }

  getProperty(name: string): Promise<Property | undefined> {
    return this.link.call("getProperty", [name]);
  }

  saveCheckpoint(includeOptimizerState = true): Promise<Uint8Array> {
    return this.link.call("saveCheckpoint", [includeOptimizerState]);
  }

  exportModelForInferencing(outputNames: readonly string[]): Promise<Uint8Array> {
    return this.link.call("exportModelForInferencing", [outputNames]);
  }

  /** Let all that is random in training follow from a number, from here on. */
  setSeed(seed: number | bigint): Promise<void> {
    return this.link.call("setSeed", [seed]);
  }

  /** Free the session in the worker. */
  release(): Promise<void> {
    return this.link.call("release", []);
  }

  /** End the worker at once; calls that were not answered are rejected. */
  terminate(): void {
    this.link.end("the worker was ended by terminate()");
  }
}

class Link {
  private readonly pending = new Map<number, Pending>();
  private waiting: Call[] | null = [];
  private ended: string | null = null;
  private last = 0;

  constructor(private readonly worker: WorkerLike) {
    if (typeof worker?.postMessage !== "function") {
      throw new ArgumentError("a worker is needed: new Worker(url, { type: 'module' })");
    }
    worker.addEventListener("message", (event: MessageEvent) => this.hear(event.data as Reply));
    worker.addEventListener("error", (event: ErrorEvent) =>
      this.end(
        `the worker failed: ${event.message || "its script could not be loaded"}. What it has saved ` +
          "is still there: make a new worker and go on from that",
      ),
    );
    worker.addEventListener("messageerror", () =>
      this.end("an answer of the worker could not be read"),
    );
    // It may have said that it is ready before anybody listened.
    worker.postMessage({ onnxtrain: "hello" });
  }

  private hear(reply: Reply): void {
    if (reply?.onnxtrain === "ready") this.begin();
    else if (reply?.onnxtrain === "holding") this.waitForEnd(reply.lock);
    else if (reply && "id" in reply) this.settle(reply);
  }

  private settle(reply: Extract<Reply, { readonly id: number }>): void {
    const pending = this.pending.get(reply.id);
    if (!pending) return;
    if (reply.onnxtrain === "progress") {
      pending.progress?.(reply.event);
      return;
    }
    this.pending.delete(reply.id);
    if (reply.onnxtrain === "result") pending.resolve(reply.value as never);
    else pending.reject(revived(reply.name, reply.message));
  }

  /** The worker listens: what came before would have been lost, so it has waited. */
  private begin(): void {
    const { waiting } = this;
    if (!waiting) return;
    this.waiting = null;
    if (locksOf()) {
      const lock = `onnxtrain-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
      this.post({ onnxtrain: "hold", lock });
    }
    for (const call of waiting) this.post(call);
  }

  /**
   * The worker holds a lock as long as it lives. Nothing else tells a page that the browser has
   * ended one, for want of memory for example.
   */
  private waitForEnd(lock: string): void {
    void locksOf()?.request(lock, () => {
      this.end(
        "the worker has ended: the browser may have been short of memory. What it has saved is " +
          "still there: make a new worker and go on from that",
      );
    });
  }

  private post(call: Call): void {
    try {
      this.worker.postMessage(call);
    } catch (error) {
      if (!("id" in call)) return;
      const pending = this.pending.get(call.id);
      this.pending.delete(call.id);
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
    if (this.ended !== null) return Promise.reject(new WorkerError(this.ended));
    this.last += 1;
    const id = this.last;
    const call: Call = { onnxtrain: "call", id, method, args: args.map(sendable) };
    return new Promise<T>((resolve, reject) => {
      this.pending.set(id, { resolve, reject, progress });
      const abort = (): void => {
        if (this.waiting) this.waiting.push({ onnxtrain: "abort", id });
        else this.post({ onnxtrain: "abort", id });
      };
      if (this.waiting) this.waiting.push(call);
      else this.post(call);
      if (signal?.aborted) abort();
      else signal?.addEventListener("abort", abort, { once: true });
    });
  }

  end(reason: string): void {
    if (this.ended !== null) return;
    this.ended = reason;
    this.worker.terminate();
    for (const pending of this.pending.values()) pending.reject(new WorkerError(reason));
    this.pending.clear();
  }
}

function locksOf(): LockManager | undefined {
  return (globalThis as { navigator?: { locks?: LockManager } }).navigator?.locks;
}

/** Tensors of onnxruntime have methods and cannot be posted; what they hold can. */
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
