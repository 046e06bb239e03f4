// @ts-check
// Arming: the way from a choice to an action: safe, armed, previewed, applied. Pure but for its clock.
//
// Invariant: only what was previewed is applied. A change of the target, the name or the way leads back to armed; a
// move of the slider stays in the preview, which shows it, and once applied it is sent.

import { CLOCK } from "./press.js";

/**
 * @typedef {"safe" | "armed" | "preview" | "applied"} Stage
 * @typedef {{request: number, way: import("./ratio.js").Way, name: string, percent: number}} Choice
 *   request: a key; 0 for all
 */

export const ARMED_MS = 60_000;

export class Arming {
  /**
   * @param {() => void} onChange
   * @param {import("./press.js").Clock} [clock]
   */
  constructor(onChange, clock = CLOCK) {
    this.onChange = onChange;
    this.clock = clock;
    /** @type {Stage} */
    this.stage = "safe";
    /** @type {Choice} */
    this.choice = { request: 0, way: "add", name: "", percent: 0 };
    /** How many requests ran when the preview was opened. */
    this.running = 0;
    /** The number that was typed. */
    this.typed = "";
    this.timer = null;
  }

  get armed() {
    return this.stage !== "safe";
  }

  /** Whether the preview may be applied: an action on all requests needs their number. */
  get ready() {
    return this.stage === "preview" && (this.choice.request !== 0 || this.typed.trim() === String(this.running));
  }

  arm() {
    if (!this.armed) this.set("armed");
  }

  disarm() {
    this.clock.cancel(this.timer);
    if (this.armed) this.set("safe");
  }

  /** Stay armed: the controls are used. */
  touch() {
    this.clock.cancel(this.timer);
    if (this.armed) this.timer = this.clock.later(() => this.disarm(), ARMED_MS);
  }

  /**
   * Change the choice.
   * @param {Partial<Choice>} changes
   * @returns {boolean} whether it is to be sent: the slider of what is applied was moved
   */
  choose(changes) {
    const before = this.choice;
    this.choice = { ...before, ...changes };
    const { request, way, name } = this.choice;
    const same = request === before.request && way === before.way && name === before.name;
    if (!same && (this.stage === "preview" || this.stage === "applied")) this.set("armed");
    else {
      this.touch();
      this.onChange();
    }
    return same && this.stage === "applied" && this.choice.percent !== before.percent;
  }

  /** @param {number} running how many requests run */
  preview(running) {
    if (this.stage !== "armed") return;
    [this.running, this.typed] = [running, ""];
    this.set("preview");
  }

  /** @param {string} text */
  type(text) {
    this.typed = text;
    this.touch();
    this.onChange();
  }

  /** Return what is to be sent; null if nothing may be. */
  apply() {
    if (!this.ready) return null;
    this.set("applied");
    return this.choice;
  }

  /** What was applied is not held any more. */
  ended() {
    if (this.stage === "applied") this.set("armed");
  }

  /** Leave the preview. */
  back() {
    if (this.stage === "preview") this.set("armed");
  }

  /** @param {Stage} stage */
  set(stage) {
    this.stage = stage;
    this.touch();
    this.onChange();
  }
}
