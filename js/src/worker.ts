/**
 * Training in a Web Worker. In the worker:
 *
 * ```js
 * import * as ort from "onnxruntime-web/wasm";
 * import { serve } from "onnxtrain";
 * serve(ort);
 * ```
 *
 * In the page, `connect` returns the session, with methods that return promises.
 */

import { messageOf, OnnxTrainError, StateError } from "./errors.js";
import { evaluate, fit, type FitOptions, type ProgressEvent } from "./fit.js";
import type { FitData } from "./fit-data.js";
import type { HeadOptions } from "./heads.js";
import type { Ort, OrtTensor } from "./runtime.js";
import { TrainingSession } from "./session.js";
import { CheckpointStore } from "./store.js";
import { CheckpointState } from "./state.js";
import { setSeed } from "./random.js";
import {
  type Call,
  METHODS,
  type PlainTensor,
  type Reply,
  type WorkerFitOptions,
  type WorkerOptions,
} from "./worker-messages.js";

interface Port {
  postMessage(message: unknown): void;
  addEventListener(type: "message", listener: (event: MessageEvent) => void): void;
}

/** Serve the requests of `connect`. */
export function serve(ort: Ort, port: Port = globalThis as unknown as Port): void {
  new Server(ort, port).start();
}

class Server {
  private _session: TrainingSession | null = null;
  private readonly _aborts = new Map<number, AbortController>();

  constructor(
    private readonly _ort: Ort,
    private readonly _port: Port,
  ) {}

  start(): void {
    this._port.addEventListener("message", ({ data }) => {
      const call = data as Call;
      if (call?.onnxtrain === "abort") this._aborts.get(call.id)?.abort();
      else if (call?.onnxtrain === "call") void this._answer(call);
      else if (call?.onnxtrain === "hello") this._post({ onnxtrain: "ready" });
      else if (call?.onnxtrain === "hold") this._hold(call.lock);
    });
    this._post({ onnxtrain: "ready" });
  }

  /** Hold a lock until the worker ends, which tells the page. */
  private _hold(lock: string): void {
    void navigator.locks?.request(lock, () => {
      this._post({ onnxtrain: "holding", lock });
      return new Promise<never>(() => undefined);
    });
  }

  private _post(reply: Reply): void {
    this._port.postMessage(reply);
  }

  private async _answer(call: Call & { onnxtrain: "call" }): Promise<void> {
    try {
      const value = await this._perform(call.id, call.method, call.args);
      this._post({ onnxtrain: "result", id: call.id, value });
    } catch (error) {
      const name = error instanceof Error ? error.name : "Error";
      this._post({ onnxtrain: "error", id: call.id, name, message: messageOf(error) });
    } finally {
      this._aborts.delete(call.id);
    }
  }

  private async _perform(id: number, method: string, args: readonly unknown[]): Promise<unknown> {
    if (method === "create") return this._create(args[0] as WorkerOptions);
    if (method === "setSeed") return setSeed(args[0] as number);
    const { _session: session } = this;
    if (!session) throw new StateError("there is no session in the worker yet");
    if (method === "fit") {
      return this._fit(session, id, args[0] as FitData, args[1] as WorkerFitOptions | undefined);
    }
    if (method === "evaluateData") {
      return evaluate(
        session,
        args[0] as FitData,
        args[1] as Pick<FitOptions, "batchSize" | "metrics">,
      );
    }
    if (method === "fitHead") {
      const { fitHead } = await import("./heads.js");
      return fitHead(session, args[0] as FitData, args[1] as HeadOptions | undefined);
    }
    if (!(METHODS as readonly string[]).includes(method)) throw new OnnxTrainError(`a worker has no method '${method}'`);
    const call = (session as unknown as Record<string, (...args: unknown[]) => unknown>)[method]!;
    return plain(await call.apply(session, [...args]));
  }

  private async _create(options: WorkerOptions): Promise<unknown> {
    await this._session?.release();
    this._session = null;
    this._session = await (options.folder === undefined
      ? TrainingSession.create(
          {
            ...options,
            ort: this._ort,
            checkpointState: await CheckpointState.load(options.checkpoint),
          },
          options.sessionOptions,
        )
      : TrainingSession.fromFolder({ ...options, ort: this._ort }, options.sessionOptions));
    const { _session: session } = this;
    return {
      lossName: session.lossName,
      trainingInputNames: session.inputNames(true),
      trainingOutputNames: session.outputNames(true),
      evalInputNames: session.inputNames(false),
      evalOutputNames: session.outputNames(false),
    };
  }

  private async _fit(
    session: TrainingSession,
    id: number,
    data: FitData,
    { store, ...options }: WorkerFitOptions = {},
  ): Promise<unknown> {
    const controller = new AbortController();
    this._aborts.set(id, controller);
    const opened = store ? await CheckpointStore.open(store.name) : null;
    try {
      return await fit(session, data, {
        ...options,
        save: store && opened ? opened.saver(store.key) : undefined,
        signal: controller.signal,
        onProgress: (event: ProgressEvent) => this._post({ onnxtrain: "progress", id, event }),
      });
    } finally {
      opened?.close();
    }
  }
}

/** Values that can be posted: tensors as plain objects. */
function plain(value: unknown): unknown {
  if (typeof value !== "object" || value === null || ArrayBuffer.isView(value)) return value;
  if ("dims" in value && "type" in value) {
    const { type, dims, data } = value as OrtTensor;
    return { type, dims: [...dims], data } as PlainTensor;
  }
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
}
