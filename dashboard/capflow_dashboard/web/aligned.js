// @ts-check
// Aligned: two requests beside each other, token by token. Pure.
//
// A step is a place of both: of the first request the position `step + a.off`, of the second `step + b.off`. Steps
// count from the first token, or from the first generated one.

import { MISSING } from "./protocol.js";

/** @typedef {import("./detail.js").Detail} Detail */
/** @typedef {{from: number, to: number, offs: [number, number]}} Alignment steps of either request, and the offsets */
/** @typedef {Pick<Detail, "base" | "count" | "ids">} Kept */

/** Where the spread of the reference is 0, a difference has no size: it is far. */
const FAR = 1000;

/**
 * @param {Kept} a
 * @param {Kept} b
 * @param {[number, number]} prompts the lengths of the prompts
 * @param {"start" | "generated"} align
 * @returns {Alignment}
 */
export function alignment(a, b, prompts, align) {
  /** @type {[number, number]} */
  const offs = align === "generated" ? [prompts[0], prompts[1]] : [0, 0];
  return {
    from: Math.min(a.base - offs[0], b.base - offs[1]),
    to: Math.max(a.base + a.count - offs[0], b.base + b.count - offs[1]),
    offs,
  };
}

/**
 * Return the column of a request at a step; -1 if it has none.
 * @param {Kept} detail
 * @param {number} step
 * @param {number} off
 */
export function columnAt(detail, step, off) {
  const column = step + off - detail.base;
  return column >= 0 && column < detail.count ? column : -1;
}

/**
 * Return whether the tokens at a step are the same; null if one of them is not there or not known.
 * @param {Kept} a
 * @param {Kept} b
 * @param {Alignment} aligned
 * @param {number} step
 */
export function same(a, b, { offs }, step) {
  const [x, y] = [columnAt(a, step, offs[0]), columnAt(b, step, offs[1])];
  if (x < 0 || y < 0 || a.ids[x] < 0 || b.ids[y] < 0) return null;
  return a.ids[x] === b.ids[y];
}

/**
 * Return the first step at which the tokens differ, from the step 0 on if it is among them, and how many were the same
 * before it.
 * @param {Kept} a
 * @param {Kept} b
 * @param {Alignment} aligned
 * @returns {{step: number | null, same: number}}
 */
export function firstDifference(a, b, aligned) {
  let equal = 0;
  for (let step = Math.max(0, aligned.from); step < aligned.to; step++) {
    const one = same(a, b, aligned, step);
    if (one === false) return { step, same: equal };
    if (one) equal++;
  }
  return { step: null, same: equal };
}

/**
 * Return the differences of two series, b − a, at all steps, divided by a spread: missing where one has no row, NaN
 * where one is not finite.
 * @param {Detail} a
 * @param {Detail} b
 * @param {[number, number]} rows
 * @param {Alignment} aligned
 * @param {number} spread
 */
export function differences(a, b, rows, aligned, spread) {
  const out = new Float32Array(Math.max(0, aligned.to - aligned.from)).fill(MISSING);
  for (let i = 0; i < out.length; i++) {
    const [x, y] = [columnAt(a, aligned.from + i, aligned.offs[0]), columnAt(b, aligned.from + i, aligned.offs[1])];
    if (x < 0 || y < 0) continue;
    out[i] = difference(a.values[rows[0]][x], b.values[rows[1]][y], spread);
  }
  return out;
}

/**
 * @param {number} a
 * @param {number} b
 * @param {number} spread
 */
export function difference(a, b, spread) {
  if (a === MISSING || b === MISSING) return MISSING;
  if (!Number.isFinite(a) || !Number.isFinite(b)) return NaN;
  const distance = b - a;
  return spread > 0 ? distance / spread : Math.sign(distance) * FAR;
}

/**
 * Return the rows of the series that both requests have, by the same name.
 * @param {Detail} a
 * @param {Detail} b
 * @param {(one: import("./protocol.js").Series) => string} name
 * @returns {[number, number][]}
 */
export function pairs(a, b, name) {
  const rows = new Map(b.series.map((one, row) => [name(one), row]));
  return a.series.flatMap((one, row) => {
    const other = rows.get(name(one));
    return other === undefined ? [] : [/** @type {[number, number]} */ ([row, other])];
  });
}
