import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cpSync, existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

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
    assert.match(name, /^(dist\/[\w.-]+\.(js|d\.ts)|package\.json|README\.md|LICENSE)$/);
  for (const name of [
    "dist/index.js",
    "dist/index.d.ts",
    "dist/onnxtrain.min.js",
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
  for (const name of readdirSync(join(JS, "dist"))) {
    const stem = name.replace(/\.(d\.ts|js)$/, "");
    assert.ok(stem === "onnxtrain.min" || sources.includes(stem), `${name} has no source`);
    const imported = readFileSync(join(JS, "dist", name), "utf-8").matchAll(
      /^(?:import|export)[^";]* from "([^"]+)"/gm,
    );
    for (const [, from] of imported) assert.match(from, /^\.\//);
  }
});

test("the file that pages load is small", () => {
  const file = readFileSync(join(JS, "dist/onnxtrain.min.js"));
  assert.ok(file.length < 112 * 1024, `${file.length} bytes`);
  assert.ok(gzipSync(file, { level: 9 }).length < 38 * 1024);
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
