// @ts-check
// Reference: the rows of a request that its colours are measured against, and what is computed of them.
//
// Invariant: a reference is computed once and never changes, so that a colour, once drawn, stays. It is that of the
// prompt's rows, or of the request's first 16 rows if the prompt has fewer.

import { MISSING } from "./protocol.js";

/** How many rows a reference has at least. */
export const ROWS_MIN = 16;
/** A row that is this many positions behind the newest, and missing, does not come any more: it is lost. */
export const SETTLED = 64;

/**
 * @typedef {{median: number, spread: number, low: number, high: number, rows: number}} Reference
 * spread: 1.4826 · median absolute deviation. low, high: 1.5 interquartile ranges outside the quartiles, within the
 * sample. rows: how many numbers the sample has.
 *
 * @typedef {{values: ArrayLike<number>, count: number, prompt: number, ended: boolean}} Track
 * values: of one series, by column. count: the number of columns. prompt: how many of the first columns are the
 * prompt's. ended: whether the request is over.
 *
 * @typedef {{columns: number[] | null, have: number, want: number, of: "prompt" | "first"}} Sample
 * columns: null while rows lack. have, want: how many rows there are and how many are waited for.
 */

/**
 * Return which rows of a series are its reference, or how many of them are there.
 * @param {Track} track
 * @returns {Sample}
 */
export function sample({ values, count, prompt, ended }) {
  if (prompt >= ROWS_MIN) {
    const rows = present(values, Math.min(prompt, count), Infinity);
    if (rows.length === prompt) return { columns: rows, have: prompt, want: prompt, of: "prompt" };
    if (!ended && count < prompt + SETTLED) return { columns: null, have: rows.length, want: prompt, of: "prompt" };
    if (rows.length >= ROWS_MIN) return { columns: rows, have: rows.length, want: rows.length, of: "prompt" };
  }
  const rows = present(values, count, ROWS_MIN);
  const full = rows.length === ROWS_MIN;
  const dense = full && rows[ROWS_MIN - 1] === ROWS_MIN - 1;
  const settled = full && count >= rows[ROWS_MIN - 1] + SETTLED;
  const ready = dense || settled || (ended && rows.length > 0);
  return { columns: ready ? rows : null, have: rows.length, want: ROWS_MIN, of: "first" };
}

/**
 * Return the first columns that have a row, at most `most` of them.
 * @param {ArrayLike<number>} values
 * @param {number} end
 * @param {number} most
 */
function present(values, end, most) {
  const columns = [];
  for (let column = 0; column < end && columns.length < most; column++) {
    if (values[column] !== MISSING) columns.push(column);
  }
  return columns;
}

/**
 * Return the reference of a sample; NaN and infinity are left out.
 * @param {Iterable<number>} values
 * @returns {Reference}
 */
export function summarise(values) {
  const sorted = Float64Array.from(values).filter(Number.isFinite).sort();
  if (!sorted.length) return { median: NaN, spread: NaN, low: NaN, high: NaN, rows: 0 };
  const median = quantile(sorted, 0.5);
  const spread = 1.4826 * quantile(sorted.map((value) => Math.abs(value - median)).sort(), 0.5);
  const [first, third] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
  const reach = 1.5 * (third - first);
  return {
    median,
    spread,
    low: Math.max(sorted[0], first - reach),
    high: Math.min(sorted[sorted.length - 1], third + reach),
    rows: sorted.length,
  };
}

/**
 * @param {Float64Array} sorted
 * @param {number} q
 */
function quantile(sorted, q) {
  const at = q * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

/**
 * Return the references that a server's baseline gives, one for each series; null where it has none.
 * @param {import("./protocol.js").Baseline | null | undefined} baseline
 * @param {number} length
 * @returns {(Reference | null)[]}
 */
export function fromBaseline(baseline, length) {
  return Array.from({ length }, (_, i) => {
    const [median, spread, low, high] = baseline
      ? [baseline.median[i], baseline.spread[i], baseline.low[i], baseline.high[i]]
      : [];
    if (median == null || spread == null || low == null || high == null) return null;
    return { median, spread, low, high, rows: baseline?.tokens ?? 0 };
  });
}

/** The references of one request, one for each series. */
export class References {
  /** @param {number} length the number of series */
  constructor(length) {
    /** @type {(Reference | null)[]} */
    this.all = new Array(length).fill(null);
    /** What the first series without a reference still waits for. @type {Sample | null} */
    this.waits = null;
    /** Of which rows the references are. @type {"prompt" | "first"} */
    this.of = "first";
  }

  get ready() {
    return this.all.every((reference) => reference !== null);
  }

  /**
   * Compute those references whose rows are complete; the others stay null.
   * @param {ArrayLike<number>[]} series
   * @param {{count: number, prompt: number, ended: boolean}} track
   * @returns {boolean} whether one was added
   */
  update(series, track) {
    let added = false;
    this.waits = null;
    for (let row = 0; row < this.all.length; row++) {
      if (this.all[row]) continue;
      const values = series[row];
      const rows = sample({ values, ...track });
      if (rows.columns) {
        this.all[row] = Object.freeze(summarise(rows.columns.map((column) => values[column])));
        this.of = rows.of;
        added = true;
      } else {
        this.waits ??= rows;
      }
    }
    return added;
  }
}
