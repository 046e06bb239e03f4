// @ts-check
// Frames: when the page works. Everything is drawn in an animation frame, only the parts that changed, and the duration
// of these frames is measured.

const KEPT_MS = 5000;
const KEPT_MAX = 512;

export class Frames {
  constructor() {
    /** What draws each part, in order. @type {Map<string, () => void>} */
    this.parts = new Map();
    /** @type {Set<string>} */
    this.stale = new Set();
    this.awaited = false;
    /** @type {(() => void)[]} */
    this.before = [];
    /** @type {(() => void)[]} */
    this.after = [];
    /** Ends and durations of the latest frames, ms. @type {[number, number][]} */
    this.times = [];
    /** The latest durations of our own work in a frame, ms. @type {[number, number][]} */
    this.costs = [];
  }

  /**
   * @param {string} part
   * @param {() => void} draw
   */
  add(part, draw) {
    this.parts.set(part, draw);
  }

  /**
   * Draw parts in the next frame.
   * @param {string[]} parts
   */
  draw(...parts) {
    for (const part of parts) this.stale.add(part);
    this.ask();
  }

  ask() {
    if (this.awaited) return;
    this.awaited = true;
    requestAnimationFrame((at) => this.frame(at));
  }

  /** @param {number} at */
  frame(at) {
    this.awaited = false;
    const begun = performance.now();
    for (const call of this.before) call();
    for (const [part, draw] of this.parts) if (this.stale.delete(part)) draw();
    for (const call of this.after) call();
    keep(this.costs, performance.now() - begun);
    // The next frame begins when this one is laid out and painted.
    requestAnimationFrame((next) => keep(this.times, next - at));
  }

  /** The 95th percentile of the duration of frames of the last seconds, ms; null if none was drawn. */
  get p95() {
    return p95(this.times);
  }

  /** The same of our own work, ms. */
  get cost() {
    return p95(this.costs);
  }
}

/**
 * @param {[number, number][]} list
 * @param {number} value
 */
function keep(list, value) {
  const now = performance.now();
  list.push([now, value]);
  if (list.length > KEPT_MAX || now - list[0][0] > 2 * KEPT_MS) {
    const first = list.findIndex(([at]) => now - at < KEPT_MS);
    list.splice(0, Math.max(first, list.length - KEPT_MAX));
  }
}

/** @param {[number, number][]} list */
function p95(list) {
  const now = performance.now();
  const kept = list.filter(([at]) => now - at < KEPT_MS).map(([, value]) => value);
  if (!kept.length) return null;
  kept.sort((a, b) => a - b);
  return kept[Math.min(kept.length - 1, Math.floor(kept.length * 0.95))];
}
