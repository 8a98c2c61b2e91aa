import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { launch, serveTests, skip } from "./chromium.js";
import { NETWORKS } from "./golden.js";

let browser, served, page;

before(async () => {
  if (skip) return;
  browser = await launch();
  served = await serveTests();
  page = await open();
});

after(async () => {
  await browser?.close();
  served?.server.close();
});

async function open() {
  const made = await browser.newPage();
  await made.goto(`${served.address}test/pages/index.html`);
  await made.evaluate(async () => {
    const [ort, onnxtrain, golden] = await Promise.all([
      import("/node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs"),
      import("/dist/index.js"),
      import("/test/golden.js"),
    ]);
    const bytes = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());
    const worker = () => new Worker("/test/pages/worker.js", { type: "module" });
    Object.assign(window, { ort, ...onnxtrain, golden, bytes, worker });
    // What an error says, whatever is thrown; "" if nothing is.
    window.told = async (work) => {
      try {
        await work();
        return "";
      } catch (error) {
        return `${error.name}: ${error.message}`;
      }
    };
  });
  return made;
}

for (const threads of [1, 2]) {
  for (const name of NETWORKS) {
    test(`${name} trains in Chromium as in Python, threads: ${threads}`, { skip }, async () => {
      const isolated = await open();
      const worst = await isolated.evaluate(
        async ([network, count]) => {
          if (!crossOriginIsolated) throw new Error("the page is not isolated");
          ort.env.wasm.numThreads = count;
          return golden.compare(ort, (file) => bytes(`/test/golden/${network}/${file}`));
        },
        [name, threads],
      );
      await isolated.close();
      for (const [way, difference] of Object.entries(worst)) {
        assert.ok(difference <= 1e-5, `${way}: ${difference}`);
      }
    });
  }
}

test("low-rank factors train in Chromium, and adapters apply", { skip }, async () => {
  const worst = await page.evaluate(async () => {
    const { compareAdapter } = await import("/test/adapter.js");
    const found = await compareAdapter(ort, (file) => bytes(`/test/golden/lora/${file}`));
    const session = await connect(worker(), { folder: "/test/golden/lora" });
    const file = await session.exportAdapter();
    await session.loadAdapter(file);
    const { rank } = await Adapter.read(file);
    const net = await connect(worker(), { folder: "/test/golden/mlp" });
    const input = { data: Float32Array.from({ length: 240 }, (_, i) => Math.sin(i * i)), dims: [20, 12] };
    const labels = Array.from({ length: 20 }, (_, i) => i % 4);
    const { samples } = await net.fitHead({ arrays: [input, labels] }, { method: "class-means" });
    return { ...found, rank, samples };
  });
  assert.equal(worst.rank, 2); // also in a worker
  assert.equal(worst.samples, 20); // as are heads
  for (const way of ["losses", "factors", "applied", "trained", "fed"]) {
    assert.ok(worst[way] <= 2e-5, `${way}: ${worst[way]}`);
  }
  assert.ok(worst.nothing > 0.01);
});

test("the minified file works as the others do", { skip }, async () => {
  const loss = await page.evaluate(async () => {
    const { TrainingSession } = await import("/dist/onnxtrain.min.js");
    const session = await TrainingSession.fromFolder({ ort, folder: "/test/golden/mlp" });
    const expected = { shape: [6, 12], words: 0, classes: 4 };
    await session.step(golden.batch(0, expected));
    await session.saveCheckpoint();
    return (await session.step(golden.batch(1, expected))).loss;
  });
  assert.ok(loss > 0.5 && loss < 2.5);
});

test("checkpoints are kept, replaced, listed and forgotten", { skip }, async () => {
  const found = await page.evaluate(async () => {
    const store = await CheckpointStore.open("test");
    const { transaction } = IDBDatabase.prototype;
    const asked = new Set();
    IDBDatabase.prototype.transaction = function (...given) {
      const made = transaction.apply(this, given);
      asked.add(made.durability);
      return made;
    };
    await store.clear();
    const none = await store.load("a");
    await store.save("a", Uint8Array.of(1, 2, 3));
    await store.save("a", Uint8Array.of(4, 5));
    await store.saver("b")(Uint8Array.of(6));
    const keys = await store.keys();
    const entry = await store.entry("a");
    await store.delete("b");
    store.close();
    const closed = await told(() => store.load("a"));
    const again = await CheckpointStore.open("test");
    IDBDatabase.prototype.transaction = transaction;
    return {
      asked: [...asked],
      none,
      keys,
      entry: [...entry.bytes],
      age: Date.now() - entry.savedAt,
      closed,
      left: await again.keys(),
    };
  });
  assert.deepEqual(found.asked, ["strict"]); // on the disk before the promise is kept
  assert.equal(found.none, null);
  assert.deepEqual(found.keys, ["a", "b"]);
  assert.deepEqual(found.entry, [4, 5]);
  assert.ok(found.age >= 0 && found.age < 60_000);
  assert.match(found.closed, /StorageError: .*closed/);
  assert.deepEqual(found.left, ["a"]);
});

test("storage that is full is told, and what was kept stays", { skip }, async () => {
  const context = await browser.newContext();
  const small = await context.newPage();
  await small.goto(`${served.address}test/pages/index.html`);
  const client = await context.newCDPSession(small);
  await client.send("Storage.overrideQuotaForOrigin", {
    origin: served.address.slice(0, -1),
    quotaSize: 2_000_000,
  });
  const found = await small.evaluate(async () => {
    const { CheckpointStore } = await import("/dist/index.js");
    const store = await CheckpointStore.open("full");
    await store.save("a", new Uint8Array(1000).fill(7));
    let message = "";
    // The browser compresses what it keeps, so it has to be noise.
    const noise = new Uint8Array(40_000_000);
    for (let at = 0; at < noise.length; at += 65536) {
      crypto.getRandomValues(noise.subarray(at, at + 65536));
    }
    try {
      await store.save("a", noise);
    } catch (error) {
      message = `${error.name}: ${error.message}`;
    }
    return { message, kept: (await store.load("a")).length };
  });
  await context.close();
  assert.match(found.message, /StorageError: cannot keep the checkpoint: .*no more room/);
  assert.equal(found.kept, 1000);
});

test(
  "a worker trains as the page does, tells how it goes, and stops when told",
  { skip },
  async () => {
    const found = await page.evaluate(async () => {
      const folder = `${location.origin}/test/golden/mlp`;
      const expected = { shape: [6, 12], words: 0, classes: 4 };
      const here = await TrainingSession.fromFolder({ ort, folder });
      const there = await connect(worker(), { folder });
      const losses = [];
      for (let step = 0; step < 3; step++) {
        const feeds = golden.batch(step, expected);
        losses.push([(await here.step(feeds)).loss, (await there.step(feeds)).loss]);
      }
      const names = there.names.trainingInputNames;
      const [x, labels] = golden.batch(5, { ...expected, shape: [60, 12] });
      const data = { arrays: { x, labels } };
      const store = await CheckpointStore.open("worker");
      await store.clear();
      const events = [];
      const history = await there.fit(data, {
        epochs: 3,
        batchSize: 10,
        evaluate: data,
        metrics: ["accuracy"],
        store: { name: "worker", key: "run" },
        onProgress: (event) => events.push(event.type),
      });
      const saved = (await store.load("run")).length;
      const controller = new AbortController();
      const aborted = await there.fit(data, {
        epochs: 100_000,
        batchSize: 10,
        signal: controller.signal,
        onProgress: ({ step }) => step === 20 && controller.abort(),
      });
      const refused = await told(() => there.step([x]));
      const model = await there.exportModelForInferencing(["y"]);
      const exported = await ort.InferenceSession.create(model);
      there.terminate();
      const ended = await told(() => there.step([x, labels]));
      return {
        losses,
        names,
        events,
        epochs: history.epochs.length,
        saved,
        aborted: [aborted.aborted, aborted.losses.length],
        refused,
        ended,
        outputs: exported.outputNames,
      };
    });
    for (const [here, there] of found.losses) assert.equal(here, there);
    assert.deepEqual(found.names, ["x", "labels"]);
    assert.equal(found.epochs, 3);
    assert.equal(found.events.filter((type) => type === "step").length, 18);
    assert.equal(found.events.filter((type) => type === "saved").length, 3);
    assert.ok(found.saved > 3000);
    assert.equal(found.aborted[0], true);
    assert.ok(found.aborted[1] >= 20 && found.aborted[1] < 2000, `${found.aborted[1]}`);
    assert.match(found.refused, /InputError: 1 inputs were given/);
    assert.match(found.ended, /WorkerError/);
    assert.deepEqual(found.outputs, ["y"]);
  },
);

test("a run goes on after the tab was closed", { skip }, async () => {
  const context = await browser.newContext();
  const visit = async (work) => {
    const tab = await context.newPage();
    await tab.goto(`${served.address}test/pages/index.html`);
    const found = await tab.evaluate(work);
    await tab.close();
    return found;
  };
  const first = await visit(async () => {
    const { CheckpointStore, connect } = await import("/dist/index.js");
    const { batch } = await import("/test/golden.js");
    const session = await connect(new Worker("/test/pages/worker.js", { type: "module" }), {
      folder: `${location.origin}/test/golden/mlp`,
    });
    const [x, labels] = batch(5, { shape: [60, 12], words: 0, classes: 4 });
    await session.fit(
      { arrays: { x, labels } },
      { epochs: 2, batchSize: 7, seed: 3, store: { name: "tab", key: "run" } },
    );
    await CheckpointStore.open("tab");
    return 0;
  });
  assert.equal(first, 0);
  const losses = await visit(async () => {
    const { CheckpointStore, connect } = await import("/dist/index.js");
    const { batch } = await import("/test/golden.js");
    const [x, labels] = batch(5, { shape: [60, 12], words: 0, classes: 4 });
    const checkpoint = await (await CheckpointStore.open("tab")).load("run");
    const open = (given) =>
      connect(new Worker("/test/pages/worker.js", { type: "module" }), {
        folder: `${location.origin}/test/golden/mlp`,
        checkpoint: given,
      });
    const data = { arrays: { x, labels } };
    const resumed = await (
      await open(checkpoint)
    ).fit(data, { epochs: 4, batchSize: 7, resume: true });
    const whole = await (await open(undefined)).fit(data, { epochs: 4, batchSize: 7, seed: 3 });
    return [resumed.losses, whole.losses];
  });
  assert.equal(losses[0].length, 36);
  assert.deepEqual(losses[0], losses[1]);
  await context.close();
});

test("a worker that ends, or never begins, is told", { skip }, async () => {
  const found = await page.evaluate(async () => {
    const folder = `${location.origin}/test/golden/mlp`;
    const own = worker();
    const session = await connect(own, { folder });
    const data = { batches: [golden.batch(0, { shape: [6, 12], words: 0, classes: 4 })] };
    const store = { name: "ending", key: "run" };
    let saved = 0;
    const ended = await told(() =>
      session.fit(data, {
        epochs: 1e9,
        store,
        onProgress: ({ type }) => type === "saved" && ++saved === 5 && own.postMessage("die"),
      }),
    );
    // What it had saved is whole, and a new worker goes on with it.
    const checkpoint = await (await CheckpointStore.open(store.name)).load(store.key);
    const next = await connect(worker(), { folder, checkpoint });
    const history = await next.fit(data, { epochs: 1e9, resume: true, signal: AbortSignal.timeout(500) });
    next.terminate();
    const goneOn = history.epochs.length >= 5 && history.aborted;
    const missing = await told(() =>
      connect(new Worker("/test/pages/nothing.js", { type: "module" }), { folder }),
    );
    const other = await told(() => connect(worker(), { folder: `${location.origin}/nowhere` }));
    return { ended, goneOn, missing, other };
  });
  assert.match(found.ended, /WorkerError: the worker has ended/);
  assert.ok(found.goneOn);
  assert.match(found.missing, /WorkerError: the worker failed/);
  assert.match(found.other, /LoadError: there is no 'training_model.onnx'/);
});

test("a download that breaks off is told", { skip }, async () => {
  const broken = await open();
  await broken.route("**/cut/**", async (route) => {
    const response = await route.fetch({
      url: route.request().url().replace("/cut/", "/test/golden/mlp/"),
    });
    const body = await response.body();
    const isStep = route.request().url().endsWith("step_model.onnx");
    await route.fulfill({ status: 200, body: isStep ? body.subarray(0, body.length / 2) : body });
  });
  const message = await broken.evaluate(() =>
    told(() => TrainingSession.fromFolder({ ort, folder: "/cut" })),
  );
  assert.match(message, /ModelError: .*truncated or damaged/);
  await broken.route("**/refused/**", (route) => route.abort());
  const refused = await broken.evaluate(() =>
    told(() => TrainingSession.fromFolder({ ort, folder: "/refused" })),
  );
  assert.match(refused, /LoadError: cannot load/);
  await broken.close();
});
