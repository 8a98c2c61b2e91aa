/** Bytes from memory, a URL or, in Node, a file. */

import { ArgumentError, LoadError, messageOf } from "./errors.js";

/** The bytes of a file, its URL or, in Node, its path. */
export type Source = Uint8Array | ArrayBuffer | string | URL;

/** Load bytes. Those in memory are not copied, and must not change. */
export async function loadBytes(source: Source, what: string): Promise<Uint8Array> {
  if (source instanceof Uint8Array) return source;
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const view = source as ArrayBufferView;
    return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  }
  if (typeof source !== "string" && !(source instanceof URL)) {
    throw new ArgumentError(`${what} is the bytes of a file or its address, not ${typeof source}`);
  }
  const files = isWebAddress(source) ? null : nodeFiles();
  return files ? readFile(files, source, what) : fetchBytes(source, what);
}

/** Load a file of an artifact folder, or null if there is none. */
export async function loadIfThere(source: string, what: string): Promise<Uint8Array | null> {
  // A program that ended while it replaced the files has left the new ones in here.
  const unfinished = source.replace(/[^/]*$/, ".onnxtrain-generation/$&");
  const isFolder = !isWebAddress(source) && nodeFiles() !== null;
  return (isFolder && (await loadOrNull(unfinished, what))) || loadOrNull(source, what);
}

async function loadOrNull(source: string, what: string): Promise<Uint8Array | null> {
  try {
    return await loadBytes(source, what);
  } catch (error) {
    if (error instanceof Missing) return null;
    throw error;
  }
}

class Missing extends LoadError {}

function isWebAddress(source: string | URL): boolean {
  return /^(https?|blob|data):/i.test(String(source));
}

interface NodeFiles {
  readFile(path: string | URL): Promise<Uint8Array>;
}

function nodeFiles(): NodeFiles | null {
  // Not an import: a bundler for the web would look for the module.
  const node = (globalThis as { process?: { getBuiltinModule?(name: string): unknown } }).process;
  return (node?.getBuiltinModule?.("node:fs/promises") as NodeFiles | undefined) ?? null;
}

async function readFile(files: NodeFiles, source: string | URL, what: string): Promise<Uint8Array> {
  const path = String(source).startsWith("file:") ? new URL(source) : source;
  try {
    const bytes = await files.readFile(path);
    return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  } catch (error) {
    const isMissing = (error as { code?: string }).code === "ENOENT";
    throw new (isMissing ? Missing : LoadError)(`cannot read ${what}: ${messageOf(error)}`);
  }
}

async function fetchBytes(source: string | URL, what: string): Promise<Uint8Array> {
  let response: Response;
  try {
    response = await fetch(source);
  } catch (error) {
    throw new LoadError(`cannot load ${what} from ${source}: ${messageOf(error)}`);
  }
  if (!response.ok) {
    const isMissing = response.status === 404 || response.status === 410;
    throw new (isMissing ? Missing : LoadError)(
      `cannot load ${what}: ${source} answered ${response.status} ${response.statusText}`,
    );
  }
  let bytes: Uint8Array;
  try {
    bytes = new Uint8Array(await response.arrayBuffer());
  } catch (error) {
    throw new LoadError(
      `the download of ${what} from ${source} broke off: ${messageOf(error)}. Try again`,
    );
  }
  const size = response.headers.get("content-length");
  // The header of a compressed response has the compressed size.
  if (size !== null && !response.headers.has("content-encoding") && bytes.length < Number(size)) {
    throw new LoadError(
      `the download of ${what} from ${source} is cut off after ${bytes.length} of ${size} bytes. ` +
        "Try again",
    );
  }
  return bytes;
}
