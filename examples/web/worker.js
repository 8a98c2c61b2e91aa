/** Trains beside the page, so that drawing stays smooth. */

import * as ort from "./vendor/ort.wasm.bundle.min.mjs";
import { serve } from "./vendor/onnxtrain.js";

ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
// Several threads need a page that is cross-origin isolated; see sw.js.
ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
serve(ort);
