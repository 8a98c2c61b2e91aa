import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { cpSync, existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { sizes } from "../sizes.mjs";

const JS = fileURLToPath(new URL("..", import.meta.url));

test("the package has what it needs and nothing more", () => {
  const printed = execFileSync("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"], {
    cwd: JS,
    encoding: "utf-8",
    stdio: ["ignore", "pipe", "ignore"],
  });
  const answer = JSON.parse(printed);
  const [{ files }] = Array.isArray(answer) ? answer : Object.values(answer);
  const names = files.map(({ path }) => path);
  for (const name of names)
    assert.match(name, /^(dist\/(min\/)?[\w.-]+\.(js|d\.ts)|package\.json|README\.md|LICENSE)$/);
  for (const name of [
    "dist/index.js",
    "dist/index.d.ts",
    "dist/onnxtrain.min.js",
    "dist/min/core.js",
    "README.md",
    "LICENSE",
  ]) {
    assert.ok(names.includes(name), `${name} is missing`);
  }
  const { dependencies, peerDependencies } = JSON.parse(
    readFileSync(join(JS, "package.json"), "utf-8"),
  );
  assert.equal(dependencies, undefined);
  assert.equal(peerDependencies, undefined);
});

test("nothing of Node is imported, and nothing is left over in dist", () => {
  const sources = readdirSync(join(JS, "src")).map((name) => name.replace(/\.ts$/, ""));
  for (const name of readdirSync(join(JS, "dist")).filter((item) => item !== "min")) {
    const stem = name.replace(/\.(d\.ts|js)$/, "");
    assert.ok(stem === "onnxtrain.min" || sources.includes(stem), `${name} has no source`);
    const imported = readFileSync(join(JS, "dist", name), "utf-8").matchAll(
      /^(?:import|export)[^";]* from "([^"]+)"/gm,
    );
    for (const [, from] of imported) assert.match(from, /^\.\//);
  }
});

test("what pages load is small", () => {
  const found = sizes();
  // What it takes to train step by step, with checkpoints; export is loaded when it is asked for.
  assert.ok(found.get("core") < 70_000, `core: ${found.get("core")} bytes`);
  // The side of a page that trains in a worker.
  assert.ok(found.get("worker-client") < 6_000, `worker-client: ${found.get("worker-client")}`);
  // All there is, in one file.
  assert.ok(found.get("onnxtrain") < 142_000, `all: ${found.get("onnxtrain")} bytes`);
  const file = readFileSync(join(JS, "dist/onnxtrain.min.js"));
  assert.ok(gzipSync(file, { level: 9 }).length < 52_000);
});

test("all that is tested on the single files holds for the minified one", () => {
  const files = ["adapter", "checkpoint", "fit", "golden", "heads", "python", "replay", "session"].map((name) => `test/${name}.test.js`);
  const args = ["--expose-gc", "--import", "./test/minified.js", "--test", "--test-reporter=tap", ...files];
  const env = { ...process.env, ONNXTRAIN_MINIFIED: "1" };
  delete env.NODE_TEST_CONTEXT; // else it would report to this process, in a binary format
  const { status, stdout } = spawnSync(process.execPath, args, { cwd: JS, encoding: "utf-8", env });
  assert.equal(status, 0, stdout);
  assert.match(stdout, /# pass [1-9]\d/);
});

test("the example for Node learns", () => {
  // A copy within the package, where both packages are found by their names.
  const scratch = mkdtempSync(join(JS, "test", "example-"));
  try {
    cpSync(
      fileURLToPath(new URL("../../examples/node/personalise.mjs", import.meta.url)),
      join(scratch, "personalise.mjs"),
    );
    cpSync(
      fileURLToPath(new URL("../../examples/node/model", import.meta.url)),
      join(scratch, "model"),
      { recursive: true },
    );
    const printed = execFileSync(process.execPath, ["personalise.mjs"], {
      cwd: scratch,
      encoding: "utf-8",
    });
    const [, before, after] = /before: ([\d.]+), after: ([\d.]+)/.exec(printed);
    assert.ok(Number(after) > Number(before) + 0.2, printed);
    assert.ok(
      existsSync(join(scratch, "mine.onnx")) && existsSync(join(scratch, "mine.checkpoint")),
    );
  } finally {
    rmSync(scratch, { recursive: true });
  }
});
