// What the plots show: bins, curves, thresholds, spans of columns, ticks.

import assert from "node:assert/strict";
import { test } from "node:test";
import { envelope, farthest, spans } from "../../../dashboard/capflow_dashboard/web/bins.js";
import { fires, pooled, tokensAt, verdict } from "../../../dashboard/capflow_dashboard/web/curve.js";
import { MISSING } from "../../../dashboard/capflow_dashboard/web/protocol.js";
import { levels, Span, ticks } from "../../../dashboard/capflow_dashboard/web/span.js";

const binned = (values, from, to, bins, centre = 0) => {
  const out = new Float32Array(bins);
  farthest(Float32Array.from(values), from, to, centre, out);
  return [...out];
};

test("a bin has the value that is farthest from the centre, so that no outlier is lost", () => {
  assert.deepEqual(binned([1, -9, 2, 3, 4, 5], 0, 6, 3), [-9, 3, 5]);
  assert.deepEqual(binned([1, -9, 2, 3], 0, 4, 2, -9), [1, 3]);
  assert.deepEqual(binned([1, 2, 3], 0, 3, 3), [1, 2, 3]);
});

test("a bin with NaN shows it, and is missing only if all its rows are", () => {
  assert.deepEqual(binned([MISSING, 2, NaN, 50, MISSING, MISSING], 0, 6, 3), [2, NaN, MISSING]);
  assert.deepEqual(binned([1], 0, 4, 4), [1, MISSING, MISSING, MISSING]);
});

test("every column is in a bin, whatever the numbers", () => {
  for (const [count, bins] of [
    [32000, 700],
    [1000, 999],
    [17, 5],
    [7, 7],
  ]) {
    for (const column of [0, 1, Math.floor(count / 2), count - 2, count - 1]) {
      const values = new Float32Array(count);
      values[column] = 5;
      const out = new Float32Array(bins);
      farthest(values, 0, count, 0, out);
      assert.ok(out.includes(5), `${count} ${bins} ${column}`);
    }
  }
});

test("a curve keeps its lowest and highest points in their order", () => {
  const values = Float32Array.from({ length: 1000 }, (_, i) => Math.sin(i / 40));
  [values[500], values[501]] = [9, -9];
  const points = envelope(values, 0, 1000, 100);
  assert.ok(points.columns.length <= 200);
  assert.ok(points.values.includes(9) && points.values.includes(-9));
  assert.deepEqual(
    points.columns,
    points.columns.slice().sort((a, b) => a - b),
  );
});

test("a curve is broken where there is no number", () => {
  assert.deepEqual(envelope(Float32Array.from([1, NaN, MISSING, 2]), 0, 4, 50).values, [1, null, null, 2]);
  const gap = new Float32Array(1000).fill(MISSING);
  assert.ok(envelope(gap, 0, 1000, 10).values.every((value) => value === null));
});

test("spans are the runs of a flag", () => {
  assert.deepEqual(spans([0, 1, 1, 0, 1], 0, 5), [
    [1, 3],
    [4, 5],
  ]);
  assert.deepEqual(spans([1, 1, 1], 1, 3), [[1, 3]]);
  assert.deepEqual(spans([0], 0, 1), []);
});

test("what would fire at a threshold is counted, and NaN and missing never fire", () => {
  const values = [1, 2, NaN, Infinity, MISSING, 3];
  assert.deepEqual(
    [0, 2, 3, 4].map((threshold) => tokensAt(values, 6, threshold)),
    [3, 2, 1, 0],
  );
  assert.ok(!fires(Infinity, 0));
  assert.equal(verdict(values, 6, 3, "token"), "1 token");
});

test("a probe with pooling fires by the request's score, not by token", () => {
  const values = [1, NaN, 5, MISSING, 3];
  assert.deepEqual(
    ["mean", "max", "last"].map((pool) => pooled(values, 5, pool)),
    [3, 5, 3],
  );
  assert.deepEqual(
    ["mean", "max"].map((pool) => verdict(values, 5, 4, pool)),
    ["does not fire", "fires"],
  );
  assert.equal(verdict([NaN], 1, 0, "mean"), "no score");
});

test("a span that shows all grows, a zoomed one stays, one at the end follows", () => {
  const span = new Span();
  span.grow(100);
  assert.deepEqual([span.from, span.to, span.whole], [0, 100, true]);
  span.set(20, 40);
  span.grow(150);
  assert.deepEqual([span.from, span.to, span.whole], [20, 40, false]);
  span.set(130, 150);
  span.grow(160);
  assert.deepEqual([span.from, span.to], [140, 160]);
  span.fit();
  span.grow(200);
  assert.deepEqual([span.from, span.to], [0, 200]);
});

test("zoom keeps the column under the pointer, and ends are never passed", () => {
  const span = new Span();
  span.grow(1000);
  span.zoom(0.5, 250);
  assert.deepEqual([span.from, span.to], [125, 625]);
  span.fit();
  for (let i = 0; i < 20; i++) span.zoom(0.5, 999);
  assert.deepEqual([span.to, span.width], [1000, 8]);
  span.pan(1e9);
  assert.equal(span.to, 1000);
  span.pan(-1e9);
  assert.equal(span.from, 0);
  span.zoom(1e9);
  assert.ok(span.whole);
  span.set(10, 30);
  span.reveal(500);
  assert.ok(span.from <= 500 && span.to > 500);
});

test("ticks are round and few", () => {
  assert.deepEqual(ticks(0, 100, 5), [0, 20, 40, 60, 80]);
  assert.deepEqual(ticks(31990, 32000, 5), [31990, 31992, 31994, 31996, 31998]);
  assert.deepEqual(levels(-1, 1, 4), [-1, -0.5, 0, 0.5, 1]);
  assert.deepEqual(levels(0.1, 0.3, 2), [0.1, 0.2, 0.3]);
  assert.deepEqual(levels(1, 1, 4), []);
});
