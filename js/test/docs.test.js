/**
 * The JavaScript in the documents runs as it stands there, in Chromium: only the names of packages
 * become addresses. Blocks of a document run one after the other, each inside the one before, so
 * that it knows what was declared there.
 */

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { launch, serveTests, skip } from "./chromium.js";
import { golden, python } from "./folders.js";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const scratch = mkdtempSync(join(HERE, "example-docs-"));
let browser, served;

before(async () => {
  if (skip) return;
  browser = await launch();
  served = await serveTests({
    artifacts: fileURLToPath(python("mlp")),
    tuned: fileURLToPath(golden("lora")),
  });
});

after(async () => {
  await browser?.close();
  served?.server.close();
  rmSync(scratch, { recursive: true });
});

const ADDRESSES = {
  "onnxruntime-web": "/node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
  "onnxruntime-web/wasm": "/node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
  "onnxruntime-web/webgpu": "/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
  onnxtrain: "/dist/index.js",
};

// What the documents take as given.
const GIVEN = `
const folder = "/artifacts";
const signs = (count) => Float32Array.from({ length: count * 8 }, (_, i) => Math.sin(i * i));
const classes = (count) => Array.from({ length: count }, (_, i) => i % 3);
const [testInput, testLabels] = [signs(12), classes(12)];
let [input, labels] = [signs(320), classes(320)];
const data = { arrays: { input, labels } };
const told = [];
const [show, onProgress] = [(loss) => told.push(loss), (event) => told.push(event.type)];
const { signal } = new AbortController();
`;

function blocksOf(file) {
  const text = readFileSync(new URL(`../../${file}`, import.meta.url), "utf-8");
  return [...text.matchAll(/^```js\n([^]*?)^```$/gm)].map(([, block]) => block);
}

/** Split a block into its imports, with addresses for packages, and the rest. */
function split(block) {
  const imports = [];
  const rest = block.replace(/^import (.+) from "([^"]+)";.*$/gm, (_, names, from) => {
    imports.push(`import ${names} from "${ADDRESSES[from]}";`);
    return names === "* as ort" ? `const ort = await import("${ADDRESSES[from]}");` : "";
  });
  return { imports, rest };
}

/** One module of all blocks. A name that several of them import is imported once. */
function moduleOf(blocks) {
  const parts = blocks.map(split);
  const lines = parts.flatMap(({ imports }) => imports).join("\n");
  const named = [...lines.matchAll(/^import \{ (.+) \} from "\/dist/gm)].flatMap(([, names]) =>
    names.split(", "),
  );
  const nested = parts.map(({ rest }, k) => `{ told.push("block ${k}");\n${rest}`).join("\n");
  return [
    `import { ${[...new Set(named)].join(", ")} } from "/dist/index.js";`,
    GIVEN,
    "export default (async () => {",
    nested,
    "}".repeat(parts.length),
    "return told;\n})();",
  ].join("\n");
}

for (const file of ["docs/javascript.md", "js/README.md"]) {
  test(`what ${file} shows, runs`, { skip }, async () => {
    const blocks = blocksOf(file);
    assert.ok(blocks.length > 0);
    const inWorker = blocks.filter((block) => /^serve\(/m.test(block));
    const onPage = blocks.filter((block) => !inWorker.includes(block));
    for (const block of inWorker) {
      const { imports, rest } = split(block);
      const others = imports.filter((line) => !/\* as ort/.test(line));
      writeFileSync(join(scratch, "worker.js"), [...others, rest].join("\n"));
    }
    writeFileSync(join(scratch, "page.js"), moduleOf(onPage));
    writeFileSync(join(scratch, "index.html"), "<!doctype html><title>Blocks</title>");
    const page = await browser.newPage();
    const errors = [];
    page.on("pageerror", (error) => errors.push(error.message));
    await page.goto(`${served.address}test/${basename(scratch)}/index.html`);
    const told = await page.evaluate(async () => (await import("./page.js")).default);
    await page.close();
    assert.deepEqual(errors, []);
    for (let k = 0; k < onPage.length; k++) assert.ok(told.includes(`block ${k}`));
    if (inWorker.length) assert.ok(told.includes("epoch"), "the worker has told of an epoch");
  });
}
