/** Checkpoints in the browser's storage. */

import { messageOf, StorageError } from "./errors.js";

const OBJECTS = "checkpoints";
const VERSION = 1;

/** The metadata of a stored checkpoint. */
export interface StoredCheckpoint {
  readonly key: string;
  readonly bytes: Uint8Array;
  readonly savedAt: Date;
}

interface Entry {
  readonly bytes: Uint8Array;
  readonly savedAt: number;
}

/**
 * Checkpoints in IndexedDB, in a page or a worker. Each is replaced atomically: if the tab
 * is closed or storage is full, the previous one remains.
 */
export class CheckpointStore {
  private constructor(private readonly _database: IDBDatabase) {}

  /** Open the store of this name, or create it. */
  static open(name = "onnxtrain"): Promise<CheckpointStore> {
    if (typeof indexedDB === "undefined") {
      return Promise.reject(
        new StorageError(
          "there is no IndexedDB here: keep the bytes of session.saveCheckpoint() in a file",
        ),
      );
    }
    return new Promise((resolve, reject) => {
      const fail = (error: unknown): void =>
        reject(
          new StorageError(
            `the browser does not open its storage: ${messageOf(error)}. In a private window, or ` +
              "with storage switched off for this site, nothing can be kept",
          ),
        );
      let request: IDBOpenDBRequest;
      try {
        request = indexedDB.open(name, VERSION);
      } catch (error) {
        fail(error);
        return;
      }
      request.onupgradeneeded = () => request.result.createObjectStore(OBJECTS);
      request.onerror = () => fail(request.error);
      request.onblocked = () => fail("another tab holds an older version of it open");
      request.onsuccess = () => {
        const database = request.result;
        // Another tab may want to delete or upgrade it.
        database.onversionchange = () => database.close();
        resolve(new CheckpointStore(database));
      };
    });
  }

  /** Store a checkpoint under a key, replacing the previous one. */
  async save(key: string, checkpoint: Uint8Array): Promise<void> {
    const entry: Entry = { bytes: checkpoint, savedAt: Date.now() };
    await this._transaction("readwrite", (store) => store.put(entry, key), "keep the checkpoint");
  }

  /** A function that stores checkpoints under a key, for `fit({ save })`. */
  saver(key: string): (checkpoint: Uint8Array) => Promise<void> {
    return (checkpoint) => this.save(key, checkpoint);
  }

  /** The bytes of a checkpoint; null if there is none under this key. */
  async load(key: string): Promise<Uint8Array | null> {
    return (await this.entry(key))?.bytes ?? null;
  }

  /** A checkpoint and when it was saved; null if there is none under this key. */
  async entry(key: string): Promise<StoredCheckpoint | null> {
    const found = (await this._transaction(
      "readonly",
      (store) => store.get(key),
      "read the checkpoint",
    )) as Entry | undefined;
    return found ? { key, bytes: found.bytes, savedAt: new Date(found.savedAt) } : null;
  }

  /** The keys of all checkpoints. */
  async keys(): Promise<string[]> {
    const found = await this._transaction(
      "readonly",
      (store) => store.getAllKeys(),
      "list checkpoints",
    );
    return (found as IDBValidKey[]).map(String);
  }

  /** Delete a checkpoint. */
  async delete(key: string): Promise<void> {
    await this._transaction("readwrite", (store) => store.delete(key), "delete the checkpoint");
  }

  /** Delete all checkpoints. */
  async clear(): Promise<void> {
    await this._transaction("readwrite", (store) => store.clear(), "delete the checkpoints");
  }

  close(): void {
    this._database.close();
  }

  private _transaction(
    mode: IDBTransactionMode,
    ask: (store: IDBObjectStore) => IDBRequest,
    action: string,
  ): Promise<unknown> {
    return new Promise((resolve, reject) => {
      const fail = (error: unknown): void => reject(storageError(error, action));
      try {
        // What was saved is on the disk: it is there after a loss of power, too.
        const transaction = this._database.transaction(OBJECTS, mode, { durability: "strict" });
        const request = ask(transaction.objectStore(OBJECTS));
        // Data is durable only when the transaction is complete.
        transaction.oncomplete = () => resolve(request.result);
        transaction.onabort = () => fail(transaction.error ?? request.error);
        transaction.onerror = () => fail(transaction.error ?? request.error);
      } catch (error) {
        fail(error);
      }
    });
  }
}

function storageError(error: unknown, action: string): StorageError {
  const name = (error as { name?: string } | null)?.name;
  if (name === "QuotaExceededError") {
    return new StorageError(
      `cannot ${action}: the browser gives this site no more room. What was kept before is still ` +
        "there. Free space, delete other checkpoints, or save without the optimizer's state",
    );
  }
  if (name === "InvalidStateError") {
    return new StorageError(`cannot ${action}: the storage was closed. Open it anew`);
  }
  return new StorageError(`cannot ${action}: ${messageOf(error)}`);
}
