// The reference of a request: computed once of its prompt or of its first rows, and never again.

import assert from "node:assert/strict";
import { test } from "node:test";
import { MISSING } from "../../../dashboard/capflow_dashboard/web/protocol.js";
import {
  fromBaseline,
  References,
  ROWS_MIN,
  SETTLED,
  sample,
  summarise,
} from "../../../dashboard/capflow_dashboard/web/reference.js";
import { normScale, probeScale } from "../../../dashboard/capflow_dashboard/web/scale.js";

const rising = (length) => Float32Array.from({ length }, (_, i) => i + 1);
const range = (length) => Array.from({ length }, (_, i) => i);

test("a prompt of 16 or more rows is the reference, as soon as it is whole", () => {
  const values = rising(40);
  assert.deepEqual(sample({ values, count: 19, prompt: 20, ended: false }), {
    columns: null,
    have: 19,
    want: 20,
    of: "prompt",
  });
  const whole = sample({ values, count: 20, prompt: 20, ended: false });
  assert.deepEqual(whole.columns, range(20));
  assert.deepEqual(sample({ values, count: 40, prompt: 20, ended: false }), whole);
});

test("a shorter prompt is filled up to the first 16 rows", () => {
  const values = rising(40);
  assert.deepEqual(sample({ values, count: 5, prompt: 4, ended: false }), {
    columns: null,
    have: 5,
    want: ROWS_MIN,
    of: "first",
  });
  assert.deepEqual(sample({ values, count: 40, prompt: 4, ended: false }).columns, range(ROWS_MIN));
});

test("a row that may still come is waited for, a lost one is not", () => {
  const values = rising(200);
  values[3] = MISSING;
  assert.equal(sample({ values, count: 20 + SETTLED - 1, prompt: 20, ended: false }).columns, null);
  const expected = range(20).filter((column) => column !== 3);
  assert.deepEqual(sample({ values, count: 20 + SETTLED, prompt: 20, ended: false }).columns, expected);
  assert.deepEqual(sample({ values, count: 20, prompt: 20, ended: true }).columns, expected);
});

test("rows of some positions only are counted by themselves", () => {
  const values = new Float32Array(400).fill(MISSING);
  for (let column = 0; column < 400; column += 8) values[column] = column;
  const found = sample({ values, count: 400, prompt: 40, ended: false });
  assert.deepEqual(found, {
    columns: range(ROWS_MIN).map((i) => i * 8),
    have: ROWS_MIN,
    want: ROWS_MIN,
    of: "first",
  });
});

test("a request that ends early is measured against what it has", () => {
  assert.deepEqual(sample({ values: rising(3), count: 3, prompt: 2, ended: true }).columns, [0, 1, 2]);
  assert.equal(sample({ values: new Float32Array(0), count: 0, prompt: 2, ended: true }).columns, null);
});

test("median, robust spread and range leave out what is no number", () => {
  const { median, spread, low, high, rows } = summarise([1, 2, 3, 4, 100, NaN, Infinity]);
  assert.deepEqual([median, low, high, rows], [3, 1, 7, 5]);
  assert.ok(Math.abs(spread - 1.4826) < 1e-12);
  assert.equal(summarise([NaN]).rows, 0);
});

test("no colour changes as tokens come, whatever comes", () => {
  let seed = 7;
  const random = () => {
    seed = (seed * 16807) % 2147483647;
    return seed / 2147483647;
  };
  for (let round = 0; round < 14; round++) {
    const length = 260;
    const prompt = Math.floor(random() * 40);
    const values = [0, 1, 2].map(() =>
      Float32Array.from({ length }, () => {
        const draw = random();
        return draw < 0.04 ? NaN : draw < 0.08 ? Infinity : draw < 0.2 ? MISSING : random() * (round % 7 === 0 ? 0 : 9);
      }),
    );
    const references = new References(3);
    const drawn = new Map();
    for (let count = 1; count <= length; count++) {
      // Rows after the newest are not there yet; those of the last series come three columns later.
      const known = values.map((one, row) =>
        one.map((value, column) => (column < count - (row === 2 ? 3 : 0) ? value : MISSING)),
      );
      references.update(known, { count, prompt, ended: count === length });
      for (const [row, reference] of references.all.entries()) {
        for (const scale of ["z", "ratio", "log", "raw"]
          .map((kind) => normScale(kind, reference))
          .concat(probeScale(2, reference))) {
          for (let column = 0; column < count - 3; column++) {
            const step = scale.step(known[row][column]);
            const name = `${row} ${scale.kind} ${column}`;
            if (drawn.has(name)) assert.equal(step, drawn.get(name), `${name} at ${count} in round ${round}`);
            if (step >= 0) drawn.set(name, step);
          }
        }
      }
    }
    assert.ok(references.ready);
    assert.ok(drawn.size > 0);
  }
});

test("a row that comes after all changes no reference", () => {
  const values = Float32Array.from({ length: 200 }, (_, i) => i);
  values[3] = MISSING;
  const references = new References(1);
  references.update([values], { count: 20 + SETTLED, prompt: 20, ended: false });
  const [reference] = references.all;
  assert.equal(reference.rows, 19);
  values[3] = 1e6;
  assert.equal(references.update([values], { count: 200, prompt: 20, ended: true }), false);
  assert.equal(references.all[0], reference);
});

test("a baseline gives a reference for each series, and none where it has no numbers", () => {
  const baseline = { tokens: 9, median: [1, null], spread: [2, null], low: [0, null], high: [3, null] };
  assert.deepEqual(fromBaseline(baseline, 2), [{ median: 1, spread: 2, low: 0, high: 3, rows: 9 }, null]);
  assert.deepEqual(fromBaseline(null, 2), [null, null]);
});
