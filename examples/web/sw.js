/**
 * Keeps the page, so that it works offline, and adds the headers that let the browser use several
 * threads on servers that do not send them.
 */

const CACHE = "onnxtrain-digits-1";
const FILES = [
  "./",
  "index.html",
  "style.css",
  "icon.svg",
  "app.js",
  "digits.js",
  "pad.js",
  "worker.js",
  "vendor/onnxtrain.js",
  "vendor/ort.wasm.bundle.min.mjs",
  "vendor/ort-wasm-simd-threaded.wasm",
  "vendor/ort-wasm-simd-threaded.mjs",
  "model/training_model.onnx",
  "model/eval_model.onnx",
  "model/optimizer_model.onnx",
  "model/step_model.onnx",
  "model/checkpoint",
  "model/printed.bin",
];

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)));
  self.skipWaiting();
});

self.addEventListener("activate", (event) => {
  event.waitUntil(
    (async () => {
      const names = await caches.keys();
      const old = names.filter((name) => name.startsWith("onnxtrain-digits-") && name !== CACHE);
      await Promise.all(old.map((name) => caches.delete(name)));
      await self.clients.claim();
    })(),
  );
});

async function answer(request) {
  // The server first, so that a new version is seen; what was kept when there is no network.
  const cache = await caches.open(CACHE);
  let response;
  try {
    response = await fetch(request);
    if (response.ok) await cache.put(request, response.clone());
  } catch {
    response = await cache.match(request, { ignoreSearch: true });
    if (!response) return Response.error();
  }
  const headers = new Headers(response.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  return new Response(response.body, {
    status: response.status,
    statusText: response.statusText,
    headers,
  });
}

self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  if (method === "GET" && new URL(url).origin === location.origin)
    event.respondWith(answer(event.request));
});
