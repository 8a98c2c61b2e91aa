import * as ort from "../../node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs";
import { serve } from "../../dist/index.js";

ort.env.wasm.numThreads = 1;
// A worker that runs out of memory ends without a word.
self.addEventListener("message", ({ data }) => data === "die" && self.close());
serve(ort);
