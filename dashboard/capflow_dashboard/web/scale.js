// @ts-check
// Scale: maps values to one of 64 steps of colour, by a fixed reference. It draws nothing.
//
// Pure: the step of a value depends on the value and on the reference, never on other tokens.

import { MISSING } from "./protocol.js";

/** @typedef {import("./reference.js").Reference} Reference */
/** @typedef {"z" | "ratio" | "log" | "raw" | "probe"} Kind */

export const STEPS = 64;
export const Z_REACH = 3;
/** Steps of values that have no colour: no reference yet; NaN or infinity; no row. */
export const [PLAIN, ODD, ABSENT] = [-1, -2, -3];

export const TITLES = {
  z: "robust z",
  ratio: "ratio to median",
  log: "log₁₀ norm",
  raw: "norm",
  probe: "score",
};

/** The scale of one series. */
export class Scale {
  /**
   * @param {Kind} kind
   * @param {Reference | null} reference null until it is known; then nothing has a colour
   * @param {number} low the number that has the first colour
   * @param {number} high the number that has the last
   */
  constructor(kind, reference, low, high) {
    this.kind = kind;
    this.reference = reference;
    if (!(high > low)) {
      const [middle, pad] = Number.isFinite(low) ? [low, Math.abs(low) * 0.05 || 1] : [0, 1];
      [low, high] = [middle - pad, middle + pad];
    }
    this.low = low;
    this.high = high;
    this.diverging = kind === "z" || kind === "probe";
  }

  /**
   * Return a value on this scale.
   * @param {number} value
   */
  number(value) {
    const { kind, reference } = this;
    if (value === MISSING || !reference) return value;
    if (kind === "log") return value > 0 ? Math.log10(value) : NaN;
    if (kind === "ratio") return value / reference.median;
    if (kind === "z") return z(value, reference);
    return value;
  }

  /**
   * Return the step of a value: 0 to 63, or PLAIN, ODD, ABSENT.
   * @param {number} value
   */
  step(value) {
    if (value === MISSING) return ABSENT;
    if (!Number.isFinite(value)) return ODD;
    if (!this.reference?.rows) return PLAIN;
    // A norm of 0 has no logarithm; it has the first colour.
    const scaled = this.kind === "log" && value <= 0 ? this.low : this.number(value);
    const part = (scaled - this.low) / (this.high - this.low);
    return Math.round(Math.min(1, Math.max(0, part)) * (STEPS - 1));
  }
}

/**
 * Return the robust deviation; a value that differs from a reference without spread is infinitely far.
 * @param {number} value
 * @param {Reference} reference
 */
export function z(value, { median, spread }) {
  const distance = value - median;
  if (spread > 0) return distance / spread;
  return distance === 0 ? 0 : Math.sign(distance) * Infinity;
}

/**
 * Return the range of a scale of norms, of one reference or common to several.
 * @param {Kind} kind
 * @param {Reference[]} references
 */
function range(kind, references) {
  if (kind === "z") return [-Z_REACH, Z_REACH];
  const present = references.filter((one) => one.rows > 0);
  if (kind === "ratio") {
    const ends = present.flatMap((one) => [one.low / one.median, one.high / one.median]).filter(Number.isFinite);
    return [Math.min(...ends), Math.max(...ends)];
  }
  const [low, high] = [Math.min(...present.map((one) => one.low)), Math.max(...present.map((one) => one.high))];
  if (kind !== "log") return [low, high];
  const least = low > 0 ? low : Math.min(...present.map((one) => one.median).filter((median) => median > 0));
  return [Math.log10(least), Math.log10(high)];
}

/**
 * Return the scale of a series of norms.
 * @param {Exclude<Kind, "probe">} kind
 * @param {Reference | null} reference
 */
export function normScale(kind, reference) {
  const [low, high] = reference ? range(kind, [reference]) : [0, 1];
  return new Scale(kind, reference, low, high);
}

/**
 * Return the scale of each of several series of norms, with a common range; no colours until all references are known.
 * @param {Exclude<Kind, "probe">} kind
 * @param {(Reference | null)[]} references
 */
export function commonScales(kind, references) {
  const present = references.filter((one) => one !== null);
  const complete = present.length === references.length && present.length > 0;
  const [low, high] = complete ? range(kind, present) : [0, 1];
  return references.map((reference) => new Scale(kind, complete || kind === "z" ? reference : null, low, high));
}

/**
 * Return the scale of a probe's scores: centred at the threshold of its file.
 * @param {number} threshold
 * @param {Reference | null} reference
 */
export function probeScale(threshold, reference) {
  const reach = reference?.rows
    ? Math.max(Math.abs(reference.low - threshold), Math.abs(reference.high - threshold)) || 1
    : 1;
  return new Scale("probe", reference, threshold - reach, threshold + reach);
}
