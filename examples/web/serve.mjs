/**
 * Serves the page: `node examples/web/serve.mjs [port]`. The folder `vendor/` is put together from
 * the packages in js/node_modules and from js/dist; `--out DIR` writes everything to a folder
 * instead, which any web server can serve.
 */

import { createServer } from "node:http";
import { cp, mkdir, readFile, writeFile } from "node:fs/promises";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const JS = fileURLToPath(new URL("../../js/", import.meta.url));
const ORT = join(JS, "node_modules/onnxruntime-web/dist");
const VENDOR = {
  "onnxtrain.js": join(JS, "dist/onnxtrain.min.js"),
  "ort.wasm.bundle.min.mjs": join(ORT, "ort.wasm.bundle.min.mjs"),
  "ort-wasm-simd-threaded.wasm": join(ORT, "ort-wasm-simd-threaded.wasm"),
  "ort-wasm-simd-threaded.mjs": join(ORT, "ort-wasm-simd-threaded.mjs"),
};
const PAGE = [
  "index.html",
  "style.css",
  "icon.svg",
  "app.js",
  "digits.js",
  "pad.js",
  "worker.js",
  "sw.js",
  "model",
];
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".js": "text/javascript; charset=utf-8",
  ".mjs": "text/javascript; charset=utf-8",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
  ".json": "application/json",
};

/** The file that an address stands for; null if it is none of ours. */
function fileOf(path) {
  if (path === "/") return join(HERE, "index.html");
  const [first, ...rest] = path.slice(1).split("/");
  if (rest.includes("..") || rest.includes("")) return null;
  if (first === "vendor") return VENDOR[rest.join("/")] ?? null;
  return PAGE.includes(first) ? join(HERE, first, ...rest) : null;
}

/** Serve the page; resolves to the server when it listens. */
export function serve(port = 0, find = fileOf) {
  const server = createServer(async (request, response) => {
    try {
      const file = find(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
      if (!file) throw new Error("not found");
      const content = await readFile(file);
      response.writeHead(200, {
        "Content-Type": TYPES[extname(file)] ?? "application/octet-stream",
        "Content-Length": content.length,
        "Cache-Control": "no-cache",
        // These two let the browser use several threads.
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Embedder-Policy": "require-corp",
      });
      response.end(content);
    } catch {
      response.writeHead(404, { "Content-Type": "text/plain" }).end("not found");
    }
  });
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(port, "127.0.0.1", () => resolve(server));
  });
}

async function write(folder) {
  await mkdir(join(folder, "vendor"), { recursive: true });
  for (const name of PAGE) await cp(join(HERE, name), join(folder, name), { recursive: true });
  for (const [name, file] of Object.entries(VENDOR)) {
    await writeFile(join(folder, "vendor", name), await readFile(file));
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [first, second] = process.argv.slice(2);
  if (first === "--out") await write(second);
  else {
    const server = await serve(Number(first ?? 8123));
    console.log(`http://localhost:${server.address().port}/`);
  }
}
