// @ts-check
// Detail: the tokens of the shown request, and the values of every series at them. A column is a token.
//
// Arrays double as tokens come; the server bounds their number (tokens_max).

import { MISSING } from "./protocol.js";
import { fromBaseline, References } from "./reference.js";

/** @typedef {import("./protocol.js").DetailNews} DetailNews */
/** @typedef {import("./protocol.js").Series} Series */
/** @typedef {import("./protocol.js").SteeringEvent} SteeringEvent */

const COLUMNS_FIRST = 256;
const EVENTS_MAX = 4096;

export class Detail {
  /** @param {DetailNews} news the first message of a request, or one that replaces all */
  constructor(news) {
    this.key = news.key;
    /** The position of the first column. */
    this.base = news.base;
    /** @type {Series[]} */
    this.series = news.series ?? [];
    this.count = 0;
    this.capacity = COLUMNS_FIRST;
    this.ids = new Int32Array(this.capacity).fill(-1);
    /** @type {(string | null)[]} */
    this.texts = [];
    /** 1 where the token was steered. */
    this.steered = new Uint8Array(this.capacity);
    this.values = this.series.map(() => new Float32Array(this.capacity).fill(MISSING));
    /** The lowest and the highest finite value of each series. */
    this.ranges = this.series.map(() => ({ low: Infinity, high: -Infinity }));
    /** @type {SteeringEvent[]} */
    this.events = [];
    this.references = new References(this.series.length);
    /** @type {(import("./reference.js").Reference | null)[] | null} */
    this.baseline = null;
    this.baselineTokens = 0;
  }

  /**
   * Take new columns and events.
   * @param {DetailNews} news
   * @param {Float32Array} numbers [series, count]
   * @param {{promptLength: number, ended: boolean}} request
   * @returns {boolean} whether references were added, so that all colours are new
   */
  take(news, numbers, request) {
    const end = news.first + news.count;
    if (end > this.capacity) this.widen(end);
    for (let i = 0; i < news.count; i++) {
      this.ids[news.first + i] = news.ids[i];
      this.texts[news.first + i] = news.texts[i];
    }
    for (let row = 0; row < this.values.length; row++) {
      const part = numbers.subarray(row * news.count, (row + 1) * news.count);
      this.values[row].set(part, news.first);
      const range = this.ranges[row];
      for (const value of part) {
        if (!Number.isFinite(value)) continue;
        if (value < range.low) range.low = value;
        if (value > range.high) range.high = value;
      }
    }
    this.steered.fill(0, news.first, end);
    for (let i = 0; i + 1 < news.steered.length; i += 2) {
      this.steered.fill(1, Math.max(0, news.steered[i] - this.base), Math.max(0, news.steered[i + 1] - this.base));
    }
    this.count = Math.max(this.count, end);
    if (news.events?.length) this.events = [...this.events, ...news.events].slice(-EVENTS_MAX);
    let added = false;
    if (news.baseline && !this.baseline) {
      this.baseline = fromBaseline(news.baseline, this.series.length);
      this.baselineTokens = news.baseline.tokens;
      added = true;
    }
    return this.refer(request) || added;
  }

  /**
   * Compute the references whose rows are complete.
   * @param {{promptLength: number, ended: boolean}} request
   */
  refer({ promptLength, ended }) {
    if (this.references.ready) return false;
    const prompt = Math.max(0, promptLength - this.base);
    return this.references.update(this.values, { count: this.count, prompt, ended });
  }

  /** @param {number} end */
  widen(end) {
    while (this.capacity < end) this.capacity *= 2;
    /** @template {Int32Array | Uint8Array | Float32Array} T @param {T} old @param {T} next @returns {T} */
    const grow = (old, next) => {
      next.set(old);
      return next;
    };
    this.ids = grow(this.ids, new Int32Array(this.capacity).fill(-1));
    this.steered = grow(this.steered, new Uint8Array(this.capacity));
    this.values = this.values.map((old) => grow(old, new Float32Array(this.capacity).fill(MISSING)));
  }

  /** The indices of the series of norms. */
  get norms() {
    return this.series.flatMap((one, row) => (one.probe ? [] : [row]));
  }

  /** The indices of the series of probes. */
  get probes() {
    return this.series.flatMap((one, row) => (one.probe ? [row] : []));
  }
}
