// Scales and colours: which step a value has, and that every colour can be read.

import assert from "node:assert/strict";
import { test } from "node:test";
import { colours, sheetText } from "../../../dashboard/capflow_dashboard/web/palette.js";
import { MISSING } from "../../../dashboard/capflow_dashboard/web/protocol.js";
import {
  ABSENT,
  commonScales,
  normScale,
  ODD,
  PLAIN,
  probeScale,
  STEPS,
} from "../../../dashboard/capflow_dashboard/web/scale.js";

const reference = { median: 10, spread: 2, low: 6, high: 14, rows: 16 };

test("z goes from -3 to 3 and keeps the end's colour beyond", () => {
  const scale = normScale("z", reference);
  assert.deepEqual(
    [4, 16, -50, 1e9].map((value) => scale.step(value)),
    [0, STEPS - 1, 0, STEPS - 1],
  );
  assert.equal(scale.number(13), 1.5);
  assert.ok(Math.abs(scale.step(10) - (STEPS - 1) / 2) <= 0.5);
});

test("a value that differs from a reference without spread has an end's colour", () => {
  const scale = normScale("z", { ...reference, spread: 0 });
  assert.deepEqual(
    [10.1, 9.9].map((value) => scale.step(value)),
    [STEPS - 1, 0],
  );
  assert.equal(scale.step(10), 32);
});

test("raw, ratio and log take their range from the reference", () => {
  assert.deepEqual(
    ["raw", "ratio", "log"].map((kind) => {
      const scale = normScale(kind, reference);
      return [scale.low, scale.high, scale.step(6), scale.step(14)];
    }),
    [
      [6, 14, 0, 63],
      [0.6, 1.4, 0, 63],
      [Math.log10(6), Math.log10(14), 0, 63],
    ],
  );
  assert.equal(normScale("log", reference).step(0), 0);
});

test("NaN, infinity, no row and no reference are no colours, and differ", () => {
  for (const kind of ["z", "ratio", "log", "raw"]) {
    const scale = normScale(kind, reference);
    assert.deepEqual(
      [NaN, Infinity, MISSING].map((value) => scale.step(value)),
      [ODD, ODD, ABSENT],
    );
    assert.equal(normScale(kind, null).step(1), PLAIN);
  }
});

test("a probe's scale is centred at the threshold of its file", () => {
  const scale = probeScale(7, reference);
  assert.deepEqual([scale.low, scale.high], [0, 14]);
  assert.ok(scale.step(7.2) > scale.step(6.8));
});

test("the heatmap's lines share one range, and have no colour before it is known", () => {
  const other = { median: 100, spread: 1, low: 90, high: 140, rows: 16 };
  assert.deepEqual(
    commonScales("raw", [reference, other]).map((one) => [one.low, one.high]),
    [
      [6, 140],
      [6, 140],
    ],
  );
  assert.deepEqual(
    commonScales("raw", [reference, null]).map((one) => one.step(7)),
    [PLAIN, PLAIN],
  );
  assert.equal(commonScales("z", [reference, null])[0].step(4), 0);
});

test("a constant reference still has a range", () => {
  const scale = normScale("raw", { median: 5, spread: 0, low: 5, high: 5, rows: 16 });
  assert.ok(scale.low < 5 && scale.high > 5);
});

const light = (rgb) =>
  rgb
    .map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);

test("text on every colour has a contrast of 4.5 or more", () => {
  for (const theme of ["light", "dark"]) {
    for (const diverging of [true, false]) {
      for (const { back, fore } of colours(theme, diverging)) {
        const both = [light(back.match(/\d+/g).map(Number)), light(fore === "#000000" ? [0, 0, 0] : [255, 255, 255])];
        assert.ok(Math.max(...both) / Math.min(...both) >= 4.5, `${theme} ${back}`);
      }
    }
  }
});

test("a sequential scale gets steadily lighter or darker, so that its order needs no hue", () => {
  for (const theme of ["light", "dark"]) {
    const lights = colours(theme, false).map(({ back }) => light(back.match(/\d+/g).map(Number)));
    const signs = new Set(lights.slice(1).map((value, i) => Math.sign(value - lights[i])));
    assert.equal(signs.size, 1, theme);
  }
});

test("each step has a class and each pixel the colour of its class", () => {
  const text = sheetText();
  for (const name of ["seq", "div"]) for (const step of [0, 63]) assert.ok(text.includes(`.${name} .c${step} {`));
  const { back, pixel } = colours("light", true)[0];
  assert.deepEqual([pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255], back.match(/\d+/g).map(Number));
});
