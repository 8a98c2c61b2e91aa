/**
 * Bundles and minifies what `tsc` has compiled: `dist/onnxtrain.min.js`, all in one file, and
 * `dist/min/`, the parts that pages load one by one, with what they share in chunks.
 *
 * Names of properties that are only ours become short: those that begin with an underscore, and
 * those that neither the types of the package's interface mention, nor those of JavaScript, of
 * browsers and of onnxruntime, nor `KEPT`. The tests run on the minified file too.
 */

import { readdirSync, readFileSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

import { PARTS } from "./sizes.mjs";

const here = (path) => fileURLToPath(new URL(path, import.meta.url));
const read = (path) => readFileSync(here(path), "utf-8");

// The files whose types users see.
const INTERFACE = `adapter class-means core errors fit fit-data fit-evaluation heads history index inputs load module optimizer parameters random replay resume-state
  runtime schedulers session state store worker worker-client worker-messages`.split(/\s+/);
// What other programs read or write by name: metadata of graph files, options of onnxruntime.
const KEPT = `format checkpoint loss outputs trainable frozen statistics target on_cpu base folded lora layer rank scale kind extra optimization
  disable_specified_optimizers outputMetadata isTensor shape symbolicDimensions versions node
  getBuiltinModule process readFile exportModel adapterOf loadAdapter requestAdapter preferredLayout gpuBuffer fromGpuBuffer`.split(/\s+/);

const words = (text) => text.match(/[\p{L}_$][\w$]*/gu) ?? [];
const withoutComments = (text) => text.replace(/\/\*[^]*?\*\//g, "").replace(/\/\/.*$/gm, "");
// Members of interfaces and classes: what stands at the beginning of a line.
const members = (text) =>
  [...text.matchAll(/^\s*(?:static |readonly |get |set |declare |abstract |protected )*(\w+)\??\s*[(:<;]/gm)].map(
    ([, name]) => name,
  );

function typesOfPlatform() {
  const lib = readdirSync(here("node_modules/@typescript")).map((name) => `node_modules/@typescript/${name}/lib`);
  const folders = [...lib, "node_modules/onnxruntime-common/dist/esm"];
  return folders.flatMap((folder) =>
    readdirSync(here(folder))
      .filter((name) => name.endsWith(".d.ts"))
      .flatMap((name) => members(withoutComments(read(`${folder}/${name}`)))),
  );
}

/** What this JavaScript itself has, whether its types mention it or not. */
function namesOfGlobals() {
  return Object.getOwnPropertyNames(globalThis).flatMap((name) => {
    const value = globalThis[name];
    const isHolder = typeof value === "function" || (typeof value === "object" && value);
    const held = isHolder ? [value, value.prototype ?? {}] : [];
    return [name, ...held.flatMap(Object.getOwnPropertyNames)];
  });
}

function namesOfInterface() {
  return INTERFACE.flatMap((name) =>
    words(withoutComments(read(`dist/${name}.d.ts`)).replace(/^\s*(static )?private .*$/gm, "")),
  );
}

/** The names of properties in the compiled files, and whatever else is quoted there. */
function namesUsed() {
  const files = readdirSync(here("dist")).filter((name) => /^[\w-]+\.js$/.test(name));
  const code = files.map((name) => withoutComments(read(`dist/${name}`))).join("\n");
  const quoted = new Set([...code.matchAll(/["'`](\w+)["'`]/g)].map(([, name]) => name));
  return [...new Set(words(code))].filter((name) => !quoted.has(name));
}

const kept = new Set([
  ...typesOfPlatform(),
  ...namesOfGlobals(),
  ...namesOfInterface(),
  ...KEPT,
]);
const ours = namesUsed().filter((name) => name.length > 1 && !/^_/.test(name) && !kept.has(name));
const pattern = ours.map((name) => name.replaceAll("$", "\\$")).join("|");
const options = {
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "none",
  logLevel: "warning",
  mangleProps: new RegExp(`^(_\\w+|${pattern})$`),
};
await build({
  ...options,
  entryPoints: [here("dist/index.js")],
  outfile: here("dist/onnxtrain.min.js"),
});
rmSync(here("dist/min"), { recursive: true, force: true });
await build({
  ...options,
  entryPoints: PARTS.map((name) => here(`dist/${name}.js`)),
  outdir: here("dist/min"),
  chunkNames: "chunk-[hash]",
  splitting: true,
  mangleCache: {},
});
