// Two requests beside each other: alignment, the first difference, and the differences of their series.

import assert from "node:assert/strict";
import { test } from "node:test";
import {
  alignment,
  columnAt,
  difference,
  differences,
  firstDifference,
  pairs,
  same,
} from "../../../dashboard/capflow_dashboard/web/aligned.js";

const MISSING = -Infinity;

function detail(base, ids, values = [], series = []) {
  return {
    base,
    count: ids.length,
    ids: Int32Array.from(ids),
    values: values.map((row) => Float32Array.from(row)),
    series,
  };
}

test("from the start, steps are positions of both, also where tokens were dropped", () => {
  const [a, b] = [detail(2, [12, 13, 14]), detail(0, [10, 11, 12, 99])];
  const aligned = alignment(a, b, [3, 2], "start");
  assert.deepEqual(aligned, { from: 0, to: 5, offs: [0, 0] });
  assert.deepEqual(
    [0, 1, 2, 3, 4].map((step) => same(a, b, aligned, step)),
    [null, null, true, false, null],
  );
  assert.deepEqual(firstDifference(a, b, aligned), { step: 3, same: 1 });
  assert.equal(columnAt(a, 1, 0), -1);
  assert.equal(columnAt(a, 4, 0), 2);
});

test("from the first generated token, prompts of other lengths end together", () => {
  const [a, b] = [detail(0, [1, 2, 7, 8, 9]), detail(0, [5, 5, 5, 7, 8, 1])];
  const aligned = alignment(a, b, [2, 3], "generated");
  assert.deepEqual(aligned, { from: -3, to: 3, offs: [2, 3] });
  // Prompts that differ are no difference of the answers.
  assert.deepEqual(firstDifference(a, b, aligned), { step: 2, same: 2 });
});

test("without a difference there is no step, and unknown tokens neither differ nor agree", () => {
  const [a, b] = [detail(0, [1, -1, 3]), detail(0, [1, 2, 3, 4])];
  const aligned = alignment(a, b, [1, 1], "start");
  assert.deepEqual(firstDifference(a, b, aligned), { step: null, same: 2 });
  assert.deepEqual(
    firstDifference(detail(0, []), detail(9, []), alignment(detail(0, []), detail(9, []), [0, 0], "start")),
    {
      step: null,
      same: 0,
    },
  );
});

test("a difference keeps apart: no row, no number, and a reference without spread", () => {
  assert.equal(difference(1, 3, 2), 1);
  assert.equal(difference(MISSING, 3, 2), MISSING);
  assert.ok(Number.isNaN(difference(NaN, 3, 2)));
  assert.ok(Number.isNaN(difference(1, Infinity, 2)));
  assert.equal(difference(1, 3, 0), 1000);
  assert.equal(difference(3, 3, 0), 0);
});

test("series are paired by name and subtracted step by step", () => {
  const one = (site, probe = "") => ({ site, probe });
  const a = detail(
    0,
    [1, 2, 3],
    [
      [1, 2, NaN],
      [9, 9, 9],
    ],
    [one("post_block:0"), one("post_block:7")],
  );
  const b = detail(
    1,
    [2, 3, 4],
    [
      [5, 5, 5],
      [4, 8, MISSING],
    ],
    [one("x", "code"), one("post_block:0")],
  );
  const rows = pairs(a, b, ({ site, probe }) => probe || site);
  assert.deepEqual(rows, [[0, 1]]);
  const aligned = alignment(a, b, [1, 1], "start");
  const values = differences(a, b, rows[0], aligned, 2);
  assert.deepEqual([...values], [MISSING, 1, NaN, MISSING]);
});
