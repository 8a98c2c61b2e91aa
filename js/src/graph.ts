/**
 * A graph of the artifacts, and the onnxruntime session that runs it.
 *
 * The session is made when the graph first runs, so a program that takes fused steps never
 * pays for the graphs that it does not use.
 */

import type { Stored } from "./checkpoint-file.js";
import { messageOf, ModelError, quoted, RunError, StateError } from "./errors.js";
import type { Dim, ModelFile, ValueType } from "./model-file.js";
import { rewritten, storedData } from "./rewrite.js";
import type { Ort, OrtSession, OrtTensor, RunOptions, SessionOptions } from "./runtime.js";
import type { Frozen } from "./state.js";

/** How sessions are made. `batch` fixes the symbolic dimension that all inputs begin with. */
export interface Settings {
  readonly ort: Ort;
  readonly options: SessionOptions;
  batch: number | null;
  /** That of the graphs so far, or "". */
  generation: string;
  /** The bytes of the file of the base, where low-rank factors train. */
  readonly base?: Uint8Array | undefined;
}

export type Tensors = Record<string, OrtTensor>;

/** One graph file of the artifacts. */
export class Graph {
  private _session: OrtSession | null = null;
  private _version = -1;
  private _batch: number | null = null;
  private _released = false;

  constructor(
    readonly model: ModelFile,
    private readonly _settings: Settings,
    private readonly _frozen: Frozen,
    /** Outputs that only graphs read, which may stay on the device. */
    private readonly _kept: ReadonlySet<string> = new Set(),
  ) {}

  get name(): string {
    return this.model.source;
  }

  /** Run the graph and return the requested outputs. */
  async run(
    feeds: Tensors,
    fetches: readonly string[],
    options: RunOptions = {},
  ): Promise<Tensors> {
    const session = await this._current();
    try {
      return (await session.run(feeds, fetches, options)) as Tensors;
    } catch (error) {
      throw new RunError(`onnxruntime failed to run ${this.name}: ${messageOf(error)}`);
    }
  }

  async release(): Promise<void> {
    this._released = true;
    await this._drop();
  }

  private async _drop(): Promise<void> {
    const { _session: session } = this;
    this._session = null;
    await session?.release?.();
  }

  /** The session, recreated if a constant or the batch size has changed. */
  private async _current(): Promise<OrtSession> {
    if (this._released) throw new StateError("the session was released");
    const { batch } = this._settings;
    if (this._session && this._version === this._frozen.version && this._batch === batch) {
      return this._session;
    }
    await this._drop(); // free the memory of the old one first
    this._session = await this._make();
    this._version = this._frozen.version;
    this._batch = batch;
    return this._session;
  }

  private async _make(): Promise<OrtSession> {
    const { ort, batch } = this._settings;
    const options = await available(this._settings.options);
    const changes = this._inlineChanges();
    const symbol = batch === null ? null : batchSymbol(this.model.inputs);
    const isChanged = changes.size > 0 || symbol !== null;
    const data = isChanged ? rewritten(this.model, changes, symbol, batch ?? 0) : this.model.data;
    const external = this._externalData();
    const own: SessionOptions = {
      ...DEFAULTS,
      ...options,
      extra: { ...EXTRA, ...(options["extra"] as object | undefined) },
      ...(external.length ? { externalData: external } : {}),
      ...this._outputLocations(options),
    };
    const { notes } = this.model;
    if (asksForGpu(options) && notes.on_cpu) {
      console.warn(`${this.name}: these are not run by WebGPU: ${notes.on_cpu.join("; ")}`);
    }
    try {
      return await ort.InferenceSession.create(data, own);
    } catch (error) {
      const hint =
        asksForGpu(options) && notes.target !== "webgpu"
          ? ". The graph was not made for WebGPU: make it with prepare(…, " +
            "target='webgpu'), or use executionProviders: ['wasm']"
          : "";
      throw new ModelError(`onnxruntime does not load ${this.name}: ${messageOf(error).trim()}${hint}`);
    }
  }

  /** On a GPU, values that the next step reads stay there. */
  private _outputLocations(options: SessionOptions): SessionOptions {
    if (!asksForGpu(options) || "preferredOutputLocation" in options) return {};
    return {
      preferredOutputLocation: Object.fromEntries(
        this.model.outputs.map(({ name }) => [name, this._kept.has(name) ? "gpu-buffer" : "cpu"]),
      ),
    };
  }

  /** The external files of frozen parameters, in the layout that the graph expects. */
  private _externalData(): { path: string; data: Uint8Array }[] {
    const files = new Map<string, { size: number; tensors: [number, Stored][] }>();
    for (const [name, tensor] of this.model.external) {
      const value = this._frozen.values.get(name);
      if (!value) {
        throw new ModelError(
          `${this.name} takes the frozen parameter ${quoted(name)} from the checkpoint, which does ` +
            "not have it: they do not belong together",
        );
      }
      const file = files.get(tensor.location) ?? { size: 0, tensors: [] };
      file.size = Math.max(file.size, tensor.offset + tensor.length);
      file.tensors.push([tensor.offset, value]);
      files.set(tensor.location, file);
    }
    const { base } = this.model.notes;
    const ofBase = this.model.inBase.size ? [{ path: base!, data: this._base() }] : [];
    const own = [...files].map(([path, { size, tensors }]) => {
      const { file } = this._frozen;
      const isFile = file && tensors.every(([offset, value]) => liesAt(value.data, file, offset));
      if (isFile) return { path, data: file };
      // A saved checkpoint has another layout than the one that the graphs were written for.
      const data = new Uint8Array(size);
      for (const [offset, value] of tensors) data.set(value.data, offset);
      return { path, data };
    });
    return [...ofBase, ...own];
  }

  private _base(): Uint8Array {
    const { base } = this._settings;
    if (!base) {
      throw new ModelError(
        `${this.name} takes its base from the file ${quoted(this.model.notes.base!)} of its folder: ` +
          "give it as baseData",
      );
    }
    return base;
  }

  /** Small constants inside the graph whose value has changed. */
  private _inlineChanges(): Map<string, Stored> {
    const { values } = this._frozen;
    const shared = new Set(this.model.initializers.filter((name) => values.has(name)));
    const changed = new Map<string, Stored>();
    for (const [name, data] of storedData(this.model, shared)) {
      const value = values.get(name)!;
      if (!sameBytes(value.data, data)) changed.set(name, value);
    }
    return changed;
  }
}

const DEFAULTS: SessionOptions = {
  // Reuse memory at once: training needs much of it.
  enableMemPattern: false,
  logSeverityLevel: 3,
};

// In onnxruntime 1.30 this one breaks a Reshape to a computed shape before another Reshape.
const EXTRA = { optimization: { disable_specified_optimizers: "ReshapeFusion" } };

function asksForGpu(options: SessionOptions): boolean {
  const providers = (options["executionProviders"] ?? []) as (string | { name: string })[];
  const first = typeof providers[0] === "string" ? providers[0] : providers[0]?.name;
  return first === "webgpu";
}

/**
 * The options without WebGPU where there is none, and with images channels first where there is:
 * with channels last, its default, onnxruntime-web 1.30 computes the network of our tests that has
 * BatchNormalization wrongly, by one per cent in the loss.
 */
async function available(options: SessionOptions): Promise<SessionOptions> {
  if (!asksForGpu(options)) return options;
  const [first, ...others] = options["executionProviders"] as (string | object)[];
  const { gpu } = globalThis.navigator as { gpu?: { requestAdapter(): Promise<unknown> } };
  if (!("process" in globalThis) && !(await gpu?.requestAdapter())) {
    if (others.length) return { ...options, executionProviders: others };
    throw new ModelError(
      "there is no WebGPU here: executionProviders: ['webgpu', 'wasm'] takes the CPU instead",
    );
  }
  const given = typeof first === "string" ? { name: first } : first;
  return { ...options, executionProviders: [{ preferredLayout: "NCHW", ...given }, ...others] };
}

function liesAt(data: Uint8Array, file: Uint8Array, offset: number): boolean {
  return data.buffer === file.buffer && data.byteOffset - file.byteOffset === offset;
}

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((byte, index) => byte === b[index]);
}

/** The symbolic dimension that the inputs begin with, if it is one and has a name. */
export function batchSymbol(inputs: readonly ValueType[]): string | null {
  const symbols = new Set<Dim | undefined>(
    inputs.map(({ dims }) => dims?.[0]).filter((dim) => typeof dim === "string"),
  );
  return symbols.size === 1 ? ([...symbols][0] as string) : null;
}
