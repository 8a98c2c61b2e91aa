/** How large the minified files are: `node sizes.mjs`, after a build. */

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

/** What pages can load without the rest. */
export const PARTS = ["core", "adapter", "fit", "heads", "schedulers", "store", "worker", "worker-client"];

/** The bytes of the file with everything, and of each part with all that it imports. */
export function sizes() {
  const found = new Map([["onnxtrain", contentOf("onnxtrain.min.js").length]]);
  for (const name of PARTS) {
    const files = new Map();
    const visit = (file) => {
      if (files.has(file)) return;
      const content = contentOf(`min/${file}`);
      files.set(file, content.length);
      for (const [, next] of String(content).matchAll(/(?:from|import)"\.\/([\w.-]+)"/g)) visit(next);
    };
    visit(`${name}.js`);
    found.set(name, [...files.values()].reduce((sum, size) => sum + size));
  }
  return found;
}

function contentOf(path) {
  return readFileSync(new URL(`dist/${path}`, import.meta.url));
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  for (const [name, size] of sizes()) console.log(`${name}: ${size} bytes`);
}
