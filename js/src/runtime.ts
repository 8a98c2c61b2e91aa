/**
 * What is needed of onnxruntime, as types. The caller passes in the package itself
 * (`onnxruntime-web`, `onnxruntime-node`, `onnxruntime-react-native`), so none is imported here.
 */

/** The memory of a tensor. */
export type TypedArray =
  | Float32Array
  | Float64Array
  | Uint8Array
  | Int8Array
  | Uint16Array
  | Int16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array;

/** A tensor of onnxruntime. */
export interface OrtTensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: unknown;
  readonly size: number;
  readonly location?: string;
  getData?(releaseData?: boolean): Promise<unknown>;
  dispose?(): void;
}

/** A session of onnxruntime. */
export interface OrtSession {
  readonly inputNames: readonly string[];
  readonly outputNames: readonly string[];
  run(feeds: any, fetches?: any, options?: any): Promise<any>;
  release?(): Promise<void>;
}

/** The part of onnxruntime that training uses. */
export interface Ort {
  InferenceSession: {
    create(model: Uint8Array, options?: any): Promise<OrtSession>;
  };
  Tensor: new (type: any, data: any, dims?: readonly number[]) => OrtTensor;
}

/** Options of a session, as onnxruntime takes them. */
export type SessionOptions = Record<string, unknown>;

/** Options of a run, as onnxruntime takes them. */
export type RunOptions = Record<string, unknown>;
