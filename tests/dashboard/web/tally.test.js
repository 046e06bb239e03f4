// What a population says at a threshold.

import assert from "node:assert/strict";
import { test } from "node:test";
import { above, nearest, outcome, percent, shares } from "../../../dashboard/capflow_dashboard/web/tally.js";

test("counts at an edge are those of the bins above it", () => {
  // Below 0, [0, 1), [1, 2), from 2 on.
  const counts = [1, 2, 3, 4];
  assert.deepEqual(
    [0, 1, 2].map((edge) => above(counts, edge)),
    [9, 7, 4],
  );
});

test("the nearest edge is within the edges", () => {
  const edges = [0, 0.5, 1, 1.5];
  assert.deepEqual(
    [-9, 0.2, 0.3, 1, 99].map((score) => nearest(edges, score)),
    [0, 0, 1, 2, 3],
  );
});

test("labelled requests have four outcomes, and only they have precision and recall", () => {
  const population = {
    tokens: [5, 0, 5],
    requests: [
      [0, 0, 7],
      [3, 1, 1],
      [1, 0, 3],
    ],
  };
  const now = outcome(/** @type {any} */ (population), 1);
  assert.equal(now.requests, 11);
  assert.equal(now.ofRequests, 16);
  assert.deepEqual(
    [now.truePositives, now.falsePositives, now.falseNegatives, now.trueNegatives, now.precision, now.recall],
    [3, 1, 1, 4, 0.75, 0.75],
  );
  const none = { tokens: [0, 0, 0], requests: [[0], [0], [0]] };
  const empty = outcome(/** @type {any} */ (none), 0);
  assert.deepEqual([empty.precision, empty.recall, empty.tokens], [null, null, 0]);
});

test("percentages near the ends keep their digits", () => {
  assert.deepEqual(
    [percent(0, 0), percent(0, 5), percent(5, 5), percent(1, 3), percent(1, 50), percent(1, 20_000), percent(1, 300)],
    ["–", "0 %", "100 %", "33 %", "2.0 %", "0.005 %", "0.33 %"],
  );
});

test("a second without scores has no share", () => {
  assert.deepEqual(
    shares([
      [0, 0],
      [4, 1],
    ]),
    [null, 25],
  );
});
