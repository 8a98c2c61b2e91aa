/** The page: draw, be told, learn, keep. */

import { CheckpointStore, connect } from "./vendor/onnxtrain.js";
import { imageOf, prepared, printedDigits, softmax, stacked, varied } from "./digits.js";
import { Pad } from "./pad.js";

const STORE = "onnxtrain-digits";
const EPOCHS = 12;
const VARIANTS = 10; // of each drawn digit, in each run
const $ = (id) => document.getElementById(id);

let session; // in the worker
let store = null; // null where the browser keeps nothing
let printed = [];
let examples = []; // { picture, label, before, now }
let current = null;
let learning = null; // the AbortController of the run

// ---- beginning -----------------------------------------------------------------------------------

async function begin() {
  for (let digit = 0; digit < 10; digit++) addBar(digit);
  addLabels();
  const pad = new Pad($("pad"), look);
  $("clear").addEventListener("click", () => pad.clear());
  $("train").addEventListener("click", () => guarded(learn));
  $("stop").addEventListener("click", () => learning?.abort());
  $("download").addEventListener("click", () => guarded(download));
  $("forget").addEventListener("click", () => guarded(forget));
  if ("serviceWorker" in navigator)
    navigator.serviceWorker.register("sw.js").catch(() => undefined);
  store = await CheckpointStore.open(STORE).catch(tellOfStorage);
  printed = printedDigits(new Uint8Array(await (await fetch("model/printed.bin")).arrayBuffer()));
  session = await open((await store?.load("checkpoint")) ?? undefined);
  await restoreExamples();
  $("where").textContent = window.crossOriginIsolated
    ? "Trains with WebAssembly on several threads."
    : "Trains with WebAssembly on one thread.";
  document.body.dataset.ready = "true";
  await look();
}

async function open(checkpoint) {
  const start = (given) =>
    connect(new Worker("worker.js", { type: "module" }), {
      folder: new URL("model", location.href).href,
      checkpoint: given,
    });
  try {
    return await start(checkpoint);
  } catch (error) {
    if (!checkpoint) throw error;
    // What was kept does not fit the model of this version of the page.
    await store?.delete("checkpoint");
    return start(undefined);
  }
}

function tellOfStorage(error) {
  $("kept").textContent = `What it learns is gone when this tab is closed: ${error.message}`;
  return null;
}

// ---- looking -------------------------------------------------------------------------------------

async function scoresOf(pictures) {
  const labels = new Array(pictures.length).fill(0);
  const { outputs } = await session.evaluate({ image: stacked(pictures), labels });
  const { data } = outputs.scores;
  return pictures.map((_, i) => data.subarray(10 * i, 10 * i + 10));
}

async function look() {
  current = prepared($("pad"));
  $("labels").disabled = !current || !session;
  if (!current || !session) {
    $("guess").textContent = "Draw something.";
    showBars(new Array(10).fill(0));
    return;
  }
  const [scores] = await scoresOf([current]);
  const shares = softmax(scores);
  const best = shares.indexOf(Math.max(...shares));
  $("guess").textContent = `Looks like a ${best} (${Math.round(100 * shares[best])} % sure).`;
  showBars(shares);
}

function addBar(digit) {
  const item = document.createElement("li");
  item.innerHTML =
    `<span>${digit}</span><span class="track" aria-hidden="true"><span class="fill"></span></span>` +
    `<span class="share">0 %</span>`;
  $("bars").append(item);
}

function showBars(shares) {
  [...$("bars").children].forEach((item, digit) => {
    const share = `${Math.round(100 * shares[digit])} %`;
    item.querySelector(".fill").style.width = share.replace(" ", "");
    item.querySelector(".share").textContent = share;
  });
}

// ---- examples ------------------------------------------------------------------------------------

function addLabels() {
  const row = document.createElement("div");
  for (let digit = 0; digit < 10; digit++) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = digit;
    button.setAttribute("aria-label", `It is a ${digit}: keep it as an example`);
    button.addEventListener("click", () => guarded(() => addExample(digit)));
    row.append(button);
  }
  $("labels").append(row);
}

async function addExample(label) {
  if (!current) return;
  const example = { picture: current, label, before: null, now: null };
  examples.push(example);
  [example.before] = await guesses([example]);
  example.now = example.before;
  showExamples();
  await keepExamples();
  $("clear").click();
  $("pad").focus({ preventScroll: true });
  // On a small screen the buttons are below it.
  $("pad").scrollIntoView({ block: "nearest" });
}

async function guesses(some) {
  if (!some.length) return [];
  const scores = await scoresOf(some.map(({ picture }) => picture));
  return scores.map((row) => row.indexOf(Math.max(...row)));
}

function showExamples() {
  $("examples").replaceChildren(
    ...examples.map((example, index) => {
      const { picture, label, before, now } = example;
      const item = document.createElement("li");
      item.className = now === label ? "right" : "wrong";
      const image = document.createElement("img");
      image.src = imageOf(picture);
      image.alt = `Your ${label}`;
      const text = document.createElement("div");
      text.textContent = `${label}: ${before === label ? "✓" : before} → ${now === label ? "✓" : now}`;
      text.setAttribute("aria-label", `A ${label}; seen as ${before} at first, as ${now} now`);
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = "Remove";
      remove.setAttribute("aria-label", `Remove your ${label}`);
      remove.addEventListener("click", () =>
        guarded(async () => {
          examples.splice(index, 1);
          showExamples();
          await keepExamples();
        }),
      );
      item.append(image, text, remove);
      return item;
    }),
  );
  const right = (which) => examples.filter((example) => example[which] === example.label).length;
  $("score").textContent = examples.length
    ? `Before: ${right("before")} of ${examples.length} right. Now: ${right("now")} of ${examples.length}.`
    : "No digits yet: draw one, and say what it is.";
  $("score").dataset.before = right("before");
  $("score").dataset.now = right("now");
  $("train").disabled = !examples.length || learning !== null;
}

async function keepExamples() {
  const plain = examples.map(({ picture, ...rest }) => ({ ...rest, picture: [...picture] }));
  await store?.save("examples", new TextEncoder().encode(JSON.stringify(plain)));
}

async function restoreExamples() {
  const bytes = await store?.load("examples");
  if (bytes) {
    const plain = JSON.parse(new TextDecoder().decode(bytes));
    examples = plain.map((item) => ({ ...item, picture: Float32Array.from(item.picture) }));
    (await guesses(examples)).forEach((now, i) => (examples[i].now = now));
    $("download").disabled = !(await store.load("checkpoint"));
  }
  showExamples();
}

// ---- learning ------------------------------------------------------------------------------------

function lesson() {
  const drawn = examples.flatMap(({ picture, label }) => [
    { picture, label },
    ...Array.from({ length: VARIANTS }, () => ({ picture: varied(picture), label })),
  ]);
  // As many printed ones as drawn ones, so that neither is forgotten.
  const others = Array.from(
    { length: Math.min(drawn.length, printed.length) },
    (_, i) => printed[i],
  );
  const all = [...drawn, ...others];
  return {
    arrays: {
      image: stacked(all.map(({ picture }) => picture)),
      labels: all.map(({ label }) => label),
    },
  };
}

async function learn() {
  learning = new AbortController();
  showLearning(true);
  const losses = [];
  try {
    await session.setLearningRate(0.003);
    const history = await session.fit(lesson(), {
      epochs: EPOCHS,
      batchSize: 32,
      scheduler: "cosine",
      store: store ? { name: STORE, key: "checkpoint" } : undefined,
      signal: learning.signal,
      onProgress: (event) => {
        if (event.type !== "step") return;
        losses.push(event.loss);
        $("progress").value = event.step / (event.epochs * event.batches);
        drawCurve(losses);
      },
    });
    drawCurve(history.losses);
  } finally {
    learning = null;
    showLearning(false);
  }
  (await guesses(examples)).forEach((now, i) => (examples[i].now = now));
  showExamples();
  await keepExamples();
  $("download").disabled = false;
  await look();
}

function showLearning(isLearning) {
  $("train").disabled = isLearning;
  $("stop").hidden = !isLearning;
  $("progress").hidden = !isLearning;
  $("curve").hidden = false;
}

function drawCurve(losses) {
  const top = Math.max(...losses, 1e-6);
  const points = losses.map(
    (loss, i) => `${(300 * i) / Math.max(1, losses.length - 1)},${88 - (86 * loss) / top}`,
  );
  $("line").setAttribute("points", points.join(" "));
  const last = losses[losses.length - 1];
  $("curve-text").textContent =
    `Loss over ${losses.length} steps: from ${losses[0].toFixed(3)} to ${last.toFixed(3)}`;
}

// ---- keeping -------------------------------------------------------------------------------------

async function download() {
  const model = await session.exportModelForInferencing(["scores"]);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([model], { type: "application/octet-stream" }));
  link.download = "my-digits.onnx";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function forget() {
  if (!confirm("Delete your digits and what was learned from them?")) return;
  await store?.clear();
  session.terminate();
  session = await open(undefined);
  examples = [];
  showExamples();
  $("download").disabled = true;
  $("curve").hidden = true;
  await look();
}

async function guarded(action) {
  try {
    $("trouble").hidden = true;
    await action();
  } catch (error) {
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
    if (error.name === "WorkerError")
      session = await open((await store?.load("checkpoint")) ?? undefined);
  }
}

guarded(begin);
