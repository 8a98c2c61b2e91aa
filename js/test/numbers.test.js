import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

import { fromJson, toJson } from "../dist/json.js";
import { RandomState, shuffled } from "../dist/random.js";
import { PlateauLRScheduler, SCHEDULERS } from "../dist/index.js";
import { byCodePoints } from "../dist/text.js";

const vectors = fromJson(
  await readFile(new URL("./golden/vectors.json", import.meta.url), "utf-8"),
);

test("seeds of steps are those of Python", () => {
  const state = new RandomState(
    new Map([
      ["seed", 2n ** 63n + 12345n],
      ["draws", 7n],
    ]),
  );
  for (const words of vectors.get("random")) {
    assert.deepEqual([...state.next()].map(BigInt), words);
  }
  assert.equal(state.saved().get("draws"), 11n);
});

test("samples are taken in the order of Python", () => {
  for (const item of vectors.get("shuffled")) {
    const [samples, epoch] = [Number(item.get("samples")), Number(item.get("epoch"))];
    const order = shuffled(samples, BigInt(item.get("seed")), epoch);
    assert.deepEqual([...order].map(BigInt), item.get("order"));
  }
});

test("floats of Python and of JavaScript are the same numbers", () => {
  for (const [value, text] of vectors.get("floats")) {
    assert.ok(Object.is(fromJson(text), value));
    assert.ok(Object.is(fromJson(toJson(value)), value));
    assert.equal(JSON.parse(toJson(value)), value);
  }
});

test("JSON survives, with integers and floats apart", () => {
  const text =
    '{"a": 1, "b": 1.0, "c": [true, null, "é😀\\n"], "9": 18446744073709551615, "d": {}}';
  assert.equal(toJson(fromJson(text)), text);
  for (const broken of ["", "{", '{"a" 1}', "[1,]", "01", "nul", '"\n"', "1 2", "[".repeat(1000)]) {
    assert.throws(() => fromJson(broken), SyntaxError);
  }
});

test("numbers that JSON lacks are strings; the bare words of old checkpoints are read", () => {
  const numbers = [NaN, Infinity, -Infinity];
  const strict = '["NaN", "Infinity", "-Infinity"]';
  assert.equal(toJson(numbers), strict);
  assert.deepEqual(fromJson(strict), numbers);
  assert.deepEqual(fromJson("[NaN, Infinity, -Infinity]"), numbers);
  assert.deepEqual(fromJson('["NaN and Infinity"]'), ["NaN and Infinity"]);
});

test("names are sorted by code points", () => {
  const names = ["b😀", "b\uffff", "a", "b", "", "é"];
  const expected = names.slice().sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
  assert.deepEqual(names.sort(byCodePoints), expected);
});

class Counter {
  initialLr = 0;
  stepCount = 0;
  rate = 0.001;
  constructor(saved = null) {
    this.saved = saved;
  }
  getLearningRate() {
    return this.rate;
  }
  setLearningRate(rate) {
    this.rate = rate;
  }
  attach() {
    return this.saved;
  }
}

const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
const plain = (value) =>
  typeof value === "bigint" ? Number(value) : Array.isArray(value) ? value.map(Number) : value;

for (const item of vectors.get("schedulers")) {
  const settings = Object.fromEntries(
    [...item.get("settings")].map(([k, v]) => [camel(k), plain(v)]),
  );
  test(`${item.get("name")} ${JSON.stringify(settings)} gives the rates of Python`, () => {
    const optimizer = new Counter();
    const scheduler = new SCHEDULERS[item.get("name")](optimizer, settings);
    item.get("rates").forEach((rate, step) => {
      assert.ok(Math.abs(scheduler.learningRate(step) - rate) <= 1e-15, `${step}: ${rate}`);
      optimizer.stepCount = step;
      scheduler.step();
      assert.equal(optimizer.rate, scheduler.learningRate(step));
    });
    assert.deepEqual(fromJson(toJson(scheduler.state())), fromJson(item.get("state")));
    // A saved state is taken over without a word.
    const warn = console.warn;
    console.warn = () => assert.fail("no warning is due");
    new SCHEDULERS[item.get("name")](new Counter(scheduler.state()), settings);
    console.warn = warn;
  });
}

test("plateau lowers the rate when nothing becomes better", () => {
  const optimizer = new Counter();
  optimizer.rate = 1;
  const scheduler = new PlateauLRScheduler(optimizer, { patience: 1, factor: 0.5, cooldown: 1 });
  const rates = [5, 4, 4, 4, 4, 4, 4, 3].map((metric) => {
    scheduler.step(metric);
    return optimizer.rate;
  });
  assert.deepEqual(rates, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]);
  assert.throws(() => scheduler.step(), /told the measure/);
});

test("settings that make no sense are refused", () => {
  const make = (name, settings) => () => new SCHEDULERS[name](new Counter(), settings);
  assert.throws(make("linear", { warmupStepCount: 5, totalStepCount: 4 }), /warm-up is a part/);
  assert.throws(make("linear", { totalStepCount: 1.5 }), /whole number/);
  assert.throws(make("step", { stepSize: 0 }), /at least 1/);
  assert.throws(make("multistep", { milestones: [3, 1] }), /rising order/);
  assert.throws(make("exponential", { gamma: 0 }), /more than 0/);
  assert.throws(
    make("onecycle", { maxLr: 1, totalStepCount: 5, pctStart: 0.6, threePhase: true }),
    /at most 0.5/,
  );
  assert.throws(make("plateau", { factor: 1 }), /less than 1/);
  assert.throws(
    make("cosine", { totalStepCount: 5, initialLr: 0.1, minLr: 0.2 }),
    /more than the initial/,
  );
});
