// @ts-check
// Bins: fit many columns into few pixels, so that no outlier gets lost. Pure.

import { MISSING } from "./protocol.js";

/**
 * Write one value for each of `out.length` bins of the columns [from, to): NaN or infinity if the bin has one, else
 * the value that is farthest from the centre, else "missing".
 * @param {ArrayLike<number>} values
 * @param {number} from
 * @param {number} to
 * @param {number} centre
 * @param {Float32Array} out
 */
export function farthest(values, from, to, centre, out) {
  const bins = out.length;
  const width = (to - from) / bins;
  for (let bin = 0; bin < bins; bin++) {
    const first = from + Math.floor(bin * width);
    const end = Math.max(first + 1, Math.min(to, from + Math.floor((bin + 1) * width)));
    let best = MISSING;
    let far = -1;
    for (let column = first; column < end; column++) {
      const value = column < values.length ? values[column] : MISSING;
      if (value === MISSING) continue;
      if (!Number.isFinite(value)) {
        best = value;
        break;
      }
      const distance = Math.abs(value - centre);
      if (distance > far) [best, far] = [value, distance];
    }
    out[bin] = best;
  }
}

/**
 * Return the points of a curve over the columns [from, to): two a bin, lowest and highest in their order, or each
 * column if there are no more than bins. Values that cannot be drawn are null.
 * @param {ArrayLike<number>} values
 * @param {number} from
 * @param {number} to
 * @param {number} bins
 * @returns {{columns: number[], values: (number | null)[]}}
 */
export function envelope(values, from, to, bins) {
  /** @type {number[]} */ const columns = [];
  /** @type {(number | null)[]} */ const heights = [];
  const add = (/** @type {number} */ column, /** @type {number | null} */ value) => {
    columns.push(column);
    heights.push(value);
  };
  if (to - from <= 2 * bins) {
    for (let column = from; column < to; column++) {
      add(column, Number.isFinite(values[column]) ? values[column] : null);
    }
    return { columns, values: heights };
  }
  const width = (to - from) / bins;
  for (let bin = 0; bin < bins; bin++) {
    const first = from + Math.floor(bin * width);
    const end = Math.min(to, from + Math.floor((bin + 1) * width));
    let [low, high] = [-1, -1];
    for (let column = first; column < end; column++) {
      const value = values[column];
      if (!Number.isFinite(value)) continue;
      if (low < 0 || value < values[low]) low = column;
      if (high < 0 || value > values[high]) high = column;
    }
    if (low < 0) add(first, null);
    else if (low === high) add(low, values[low]);
    else for (const column of low < high ? [low, high] : [high, low]) add(column, values[column]);
  }
  return { columns, values: heights };
}

/**
 * Return the spans of columns that have a flag, as [first, end) pairs.
 * @param {ArrayLike<number>} flags
 * @param {number} from
 * @param {number} to
 * @returns {[number, number][]}
 */
export function spans(flags, from, to) {
  /** @type {[number, number][]} */ const runs = [];
  let first = -1;
  for (let column = from; column <= to; column++) {
    const on = column < to && flags[column] > 0;
    if (on && first < 0) first = column;
    if (!on && first >= 0) {
      runs.push([first, column]);
      first = -1;
    }
  }
  return runs;
}
