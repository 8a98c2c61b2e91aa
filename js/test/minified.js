/** With `--import`, lets tests that import the package have its minified file instead. */

import { register } from "node:module";

const hooks = `export async function resolve(specifier, context, next) {
  const found = await next(specifier, context);
  if (found.url.includes("/node_modules/")) return found;
  const url = found.url.replace(/\\/dist\\/index\\.js$/, "/dist/onnxtrain.min.js");
  return { ...found, url };
}`;
register(`data:text/javascript,${encodeURIComponent(hooks)}`);
