import assert from "node:assert/strict";
import { test } from "node:test";

import { bytes, golden } from "./folders.js";
import { compare, NETWORKS } from "./golden.js";
import { runtimes } from "./runtimes.js";

for (const [runtime, ort] of Object.entries(await runtimes())) {
  for (const name of NETWORKS) {
    test(`${name} trains in ${runtime} as in Python`, async () => {
      const worst = await compare(ort, (file) => bytes(golden(name), file));
      for (const [way, difference] of Object.entries(worst)) {
        assert.ok(difference <= 1e-5, `${way}: ${difference}`);
      }
    });
  }
}
