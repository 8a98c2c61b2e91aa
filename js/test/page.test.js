/** The example page, used as a person uses it. ONNXTRAIN_SHOTS=folder keeps pictures of it. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { serve } from "../../examples/web/serve.mjs";
import { launch, skip } from "./chromium.js";
import { node } from "./runtimes.js";

// Strokes on a square of 100: digits as some people write them.
const HAND = {
  1: [
    [
      [22, 48],
      [60, 12],
      [58, 90],
    ],
  ],
  4: [
    [
      [50, 8],
      [18, 62],
      [88, 58],
    ],
    [
      [62, 36],
      [54, 95],
    ],
  ],
  7: [
    [
      [14, 20],
      [84, 14],
      [40, 92],
    ],
    [
      [28, 52],
      [76, 50],
    ],
  ],
  9: [
    [
      [70, 18],
      [36, 14],
      [26, 38],
      [52, 50],
      [74, 24],
      [70, 18],
      [60, 62],
      [30, 92],
    ],
  ],
  0: [
    [
      [60, 10],
      [24, 30],
      [26, 76],
      [58, 90],
      [82, 58],
      [72, 20],
      [48, 12],
      [30, 14],
    ],
  ],
  2: [
    [
      [20, 30],
      [46, 8],
      [74, 26],
      [52, 62],
      [16, 84],
      [30, 70],
      [52, 84],
      [90, 82],
    ],
  ],
  5: [
    [
      [78, 12],
      [34, 14],
      [28, 46],
      [62, 46],
      [70, 72],
      [46, 92],
      [18, 80],
    ],
  ],
  6: [
    [
      [72, 8],
      [34, 44],
      [28, 78],
      [56, 92],
      [74, 70],
      [52, 56],
      [30, 74],
    ],
  ],
};

let browser, server, address, context, page;
const errors = [];
const scratch = mkdtempSync(join(tmpdir(), "onnxtrain-page-"));

before(async () => {
  if (skip) return;
  browser = await launch();
  server = await serve(0);
  address = `http://localhost:${server.address().port}/`;
  context = await browser.newContext({
    viewport: { width: 390, height: 844 },
    acceptDownloads: true,
  });
  page = await visit();
});

after(async () => {
  await browser?.close();
  server?.close();
  rmSync(scratch, { recursive: true });
});

async function visit() {
  const made = await context.newPage();
  made.on("pageerror", (error) => errors.push(error.message));
  made.on("dialog", (dialog) => dialog.accept());
  await made.goto(address);
  await ready(made);
  return made;
}

const ready = (some) => some.waitForSelector("body[data-ready=true]", { timeout: 60_000 });

async function draw(digit) {
  await page.locator("#pad").scrollIntoViewIfNeeded();
  const box = await page.locator("#pad").boundingBox();
  for (const stroke of HAND[digit]) {
    const at = ([x, y]) => [box.x + (box.width * x) / 100, box.y + (box.height * y) / 100];
    await page.mouse.move(...at(stroke[0]));
    await page.mouse.down();
    for (const point of stroke.slice(1)) await page.mouse.move(...at(point), { steps: 6 });
    await page.mouse.up();
  }
  await page.waitForFunction(() => /Looks like/.test(document.getElementById("guess").textContent));
}

async function shot(name) {
  const folder = process.env.ONNXTRAIN_SHOTS;
  if (folder) await page.screenshot({ path: join(folder, `${name}.png`), fullPage: true });
}

const score = async () => ({
  before: Number(await page.getAttribute("#score", "data-before")),
  now: Number(await page.getAttribute("#score", "data-now")),
});

test("it fits a phone's screen", { skip }, async () => {
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `${wide} pixels too wide`);
});

test("digits are drawn, named, and learned", { skip }, async () => {
  for (const digit of Object.keys(HAND)) {
    await draw(digit);
    if (digit === "7") await shot("draw");
    await page.click(`#labels button:text-is("${digit}")`);
    await page.waitForFunction(() =>
      /Draw something/.test(document.getElementById("guess").textContent),
    );
  }
  const first = await score();
  assert.ok(first.before < 8, "the network should not know this hand yet");
  const began = Date.now();
  await page.click("#train");
  await page.waitForSelector("#stop:not([hidden])");
  await page.waitForSelector("#stop", { state: "hidden", timeout: 120_000 });
  await page.waitForFunction(() => !document.getElementById("train").disabled);
  const second = await score();
  console.log(
    `# right before: ${second.before} of 8, after: ${second.now}, ${Date.now() - began} ms`,
  );
  assert.ok(second.now > first.before);
  assert.ok(second.now >= 7);
  assert.match(await page.textContent("#curve-text"), /Loss over \d+ steps: from/);
  await shot("learned");
});

test("it is still learned after a reload", { skip }, async () => {
  const before = await score();
  await page.reload();
  await ready(page);
  assert.deepEqual(await score(), before);
  await draw(7);
  assert.match(await page.textContent("#guess"), /Looks like a 7/);
});

test("the model can be downloaded, and runs elsewhere", { skip }, async () => {
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#download")]);
  assert.equal(download.suggestedFilename(), "my-digits.onnx");
  const path = join(scratch, "my-digits.onnx");
  await download.saveAs(path);
  const ort = await node();
  const session = await ort.InferenceSession.create(readFileSync(path));
  assert.deepEqual(session.outputNames, ["scores"]);
  const image = new ort.Tensor("float32", new Float32Array(400), [1, 1, 20, 20]);
  assert.equal((await session.run({ image })).scores.dims[1], 10);
  const python = process.env.ONNXTRAIN_PYTHON;
  if (python) {
    const program =
      "import sys, onnxruntime; print(onnxruntime.InferenceSession(sys.argv[1]).get_outputs()[0].name)";
    assert.equal(
      execFileSync(python, ["-c", program, path], { encoding: "utf-8" }).trim(),
      "scores",
    );
  }
});

test("it works offline", { skip }, async () => {
  await page.evaluate(() => navigator.serviceWorker.ready);
  await page.waitForFunction(() => caches.keys().then((names) => names.length > 0));
  await context.setOffline(true);
  try {
    await page.reload();
    await ready(page);
    await draw(1);
    await page.click("#train");
    await page.waitForSelector("#stop", { state: "hidden", timeout: 120_000 });
    assert.equal(await page.isHidden("#trouble"), true);
  } finally {
    await context.setOffline(false);
  }
});

test("the keyboard draws, and all is named for screen readers", { skip }, async () => {
  await page.click("#clear");
  await page.focus("#pad");
  for (const key of [" ", ..."ArrowDown ".repeat(10).trim().split(" ")])
    await page.keyboard.press(key);
  await page.waitForFunction(() => /Looks like/.test(document.getElementById("guess").textContent));
  const unnamed = await page.evaluate(() =>
    [...document.querySelectorAll("button, img, canvas, progress, input")]
      .filter(
        (element) =>
          !(
            element.getAttribute("aria-label") ||
            element.getAttribute("alt") ||
            element.textContent.trim()
          ),
      )
      .map((element) => element.outerHTML),
  );
  assert.deepEqual(unnamed, []);
  for (const id of ["guess", "score"])
    assert.equal(await page.getAttribute(`#${id}`, "aria-live"), "polite");
  // One h1, and headings without gaps.
  const levels = await page.evaluate(() =>
    [...document.querySelectorAll("h1, h2, h3")].map((h) => h.tagName),
  );
  assert.deepEqual(levels, ["H1", "H2", "H2", "H2", "H2"]);
});

test("it forgets", { skip }, async () => {
  await page.click("#forget");
  await page.waitForFunction(() => document.querySelectorAll("#examples li").length === 0);
  await page.reload();
  await ready(page);
  assert.equal(await page.locator("#examples li").count(), 0);
  assert.equal(await page.isDisabled("#download"), true);
});

test("nothing went wrong on the page", { skip }, () => {
  assert.deepEqual(errors, []);
});
