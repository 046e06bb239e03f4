// @ts-check
// Strip: draws one curve with a scale at its left. It keeps nothing.
//
// Our own rather than a chart library: it shares the columns of the heatmap to the pixel, and the page stays below
// 250 KB.

import { font, ink, sized } from "./inks.js";
import { levels } from "./span.js";

const TICK_PX = 17;

/**
 * @typedef {object} Curve
 * @property {number} width of the canvas, px
 * @property {number} height
 * @property {number} left where the curve begins
 * @property {number} right how much room is beside its end
 * @property {number} pad how much room is above and below
 * @property {number} from the columns that the width stands for, half a column more at each end
 * @property {number} to
 * @property {number} low the values that the height stands for
 * @property {number} high
 * @property {number[]} columns
 * @property {(number | null)[]} values null where the curve is broken
 * @property {string} colour the name of an ink
 * @property {string} [fill] the name of the ink below the curve
 * @property {(value: number) => string} show writes a tick
 * @property {(context: CanvasRenderingContext2D, x: (column: number) => number) => void} [under] draws below the curve
 */

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Curve} curve
 */
export function drawCurve(canvas, curve) {
  const { width, height, left, right, pad, from, to, low, high, columns, values } = curve;
  const context = sized(canvas, width, height);
  const plot = width - left - right;
  const x = (/** @type {number} */ column) => left + ((column - from + 0.5) / (to - from)) * plot;
  const y = (/** @type {number} */ value) => pad + ((high - value) / (high - low || 1)) * (height - 2 * pad);
  context.font = font();
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of levels(low, high, Math.max(1, Math.floor((height - 2 * pad) / TICK_PX)))) {
    context.fillStyle = ink("--line");
    context.fillRect(left, Math.round(y(value)), plot, 1);
    context.fillStyle = ink("--ink-soft");
    context.fillText(curve.show(value), left - 6, Math.min(height - 6, Math.max(6, y(value))));
  }
  context.save();
  context.beginPath();
  context.rect(left, 0, plot, height);
  context.clip();
  curve.under?.(context, x);
  const path = new Path2D();
  let begun = -1;
  const end = (/** @type {number} */ i) => {
    if (begun < 0) return;
    // A value between two gaps is a dot.
    if (i - begun === 1) path.arc(x(columns[begun]), y(/** @type {number} */ (values[begun])), 1.5, 0, 7);
    if (curve.fill) {
      const area = new Path2D();
      area.moveTo(x(columns[begun]), y(low));
      for (let at = begun; at < i; at++) area.lineTo(x(columns[at]), y(/** @type {number} */ (values[at])));
      area.lineTo(x(columns[i - 1]), y(low));
      context.fillStyle = ink(curve.fill);
      context.fill(area);
    }
    begun = -1;
  };
  for (let i = 0; i < columns.length; i++) {
    const value = values[i];
    if (value === null) end(i);
    else if (begun < 0) {
      begun = i;
      path.moveTo(x(columns[i]), y(value));
    } else path.lineTo(x(columns[i]), y(value));
  }
  end(columns.length);
  context.strokeStyle = ink(curve.colour);
  context.lineWidth = 1.4;
  context.lineJoin = "round";
  context.stroke(path);
  context.restore();
}
