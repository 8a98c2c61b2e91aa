/** A real browser for the tests: Chromium, where there is one. */

import { existsSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { serve } from "../../examples/web/serve.mjs";

const PATHS = [
  process.env.CHROMIUM,
  "/usr/bin/chromium",
  "/usr/bin/chromium-browser",
  "/usr/bin/google-chrome",
];
const executablePath = PATHS.find((path) => path && existsSync(path));

export const skip = executablePath ? false : "there is no Chromium; CHROMIUM may say where it is";

export async function launch(args = []) {
  const { chromium } = await import("playwright-core");
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", ...args] });
  const newContext = browser.newContext.bind(browser);
  browser.newContext = async (options) => {
    const context = await newContext(options);
    context.setDefaultTimeout(180_000); // on a busy machine half a minute is not much
    return context;
  };
  return browser;
}

const JS = fileURLToPath(new URL("..", import.meta.url));

/** Serve the package and its tests, and `folders`: where each first part of a path leads. */
export async function serveTests(folders = {}) {
  const server = await serve(0, (path) => {
    if (path.includes("..")) return null;
    const [, first, ...rest] = path.split("/");
    return folders[first] ? join(folders[first], ...rest) : join(JS, path);
  });
  return { server, address: `http://localhost:${server.address().port}/` };
}
