// @ts-check
// Span: which columns of a request the curves and the heatmap show. Pure.
//
// Invariant: 0 ≤ from < to. A span that shows everything, or its end, grows with the request; any other stays.

/** The least number of columns. */
export const COLUMNS_MIN = 8;
/** A request with fewer columns is shown as if it had this many, so that cells have a sensible width. */
const COLUMNS_SHOWN_MIN = 24;

export class Span {
  constructor() {
    this.from = 0;
    this.to = COLUMNS_SHOWN_MIN;
    /** The columns of the request. */
    this.count = 0;
    this.whole = true;
  }

  get width() {
    return this.to - this.from;
  }

  /** The least number of columns that shows everything. */
  get most() {
    return Math.max(this.count, COLUMNS_SHOWN_MIN);
  }

  /**
   * Take note of how many columns the request has.
   * @param {number} count
   */
  grow(count) {
    const atEnd = this.to >= this.count && this.count > 0;
    const grown = count - this.count;
    this.count = count;
    if (this.whole || this.width >= this.most) this.fit();
    else if (atEnd && grown > 0) this.set(this.from + grown, this.to + grown);
    else this.set(this.from, this.to);
  }

  /** Show everything. */
  fit() {
    [this.from, this.to, this.whole] = [0, this.most, true];
  }

  /**
   * Show the columns [from, to), or the nearest span that is possible.
   * @param {number} from
   * @param {number} to
   */
  set(from, to) {
    const width = Math.min(this.most, Math.max(COLUMNS_MIN, Math.round(to - from)));
    this.from = Math.max(0, Math.min(Math.round(from), this.most - width));
    this.to = this.from + width;
    this.whole = this.width >= this.most;
  }

  /**
   * Show more (factor > 1) or fewer columns; the column `at` keeps its place.
   * @param {number} factor
   * @param {number} at
   */
  zoom(factor, at = (this.from + this.to) / 2) {
    const width = Math.max(COLUMNS_MIN, this.width * factor);
    const part = (at - this.from) / this.width;
    this.set(at - part * width, at + (1 - part) * width);
  }

  /** @param {number} columns */
  pan(columns) {
    this.set(this.from + columns, this.to + columns);
  }

  /**
   * Move so that a column is shown.
   * @param {number} column
   */
  reveal(column) {
    if (column < this.from) this.pan(column - this.from - Math.floor(this.width / 4));
    else if (column >= this.to) this.pan(column - this.to + 1 + Math.floor(this.width / 4));
  }
}

/**
 * Return round positions for about `wanted` ticks in [from, to).
 * @param {number} from
 * @param {number} to
 * @param {number} wanted
 */
export function ticks(from, to, wanted) {
  const step = roundUp(Math.max(1, (to - from) / Math.max(1, wanted)));
  const marks = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) marks.push(at);
  return marks;
}

/**
 * Return round values in [low, high], at most `most` of them.
 * @param {number} low
 * @param {number} high
 * @param {number} most
 */
export function levels(low, high, most) {
  if (!(high > low)) return [];
  const step = roundUp((high - low) / most);
  const marks = [];
  // Products of whole numbers, so that sums do not drift.
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++)
    marks.push(Number((at * step).toPrecision(12)));
  return marks;
}

/**
 * Return the next larger number of the form 1, 2 or 5 times a power of ten.
 * @param {number} value
 */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= value) ?? 10 * power;
}
