// @ts-check
// Press: buttons that work when they are held, or pressed twice. Pure but for the clock that it is given.
//
// A press that is held for HOLD_MS runs. A shorter one runs nothing and asks for a second press, for those who cannot
// hold: it runs if it comes HOLD_MS after the first or later, so that a double click runs nothing.

/**
 * @typedef {{now: () => number, later: (call: () => void, ms: number) => any, cancel: (timer: any) => void}} Clock
 * @typedef {"rest" | "holding" | "again"} Phase
 */

export const HOLD_MS = 600;
export const AGAIN_MS = 5000;

/** @type {Clock} */
export const CLOCK = {
  now: () => performance.now(),
  later: (call, ms) => setTimeout(call, ms),
  cancel: (timer) => clearTimeout(timer),
};

export class Press {
  /**
   * @param {() => void} onChange
   * @param {Clock} [clock]
   */
  constructor(onChange, clock = CLOCK) {
    this.onChange = onChange;
    this.clock = clock;
    /** The button that is pressed or waits for its second press; empty at rest. */
    this.name = "";
    /** @type {Phase} */
    this.phase = "rest";
    /** When the first press ended. */
    this.firstAt = 0;
    /** When this press began, and whether it is the second one. */
    this.downAt = 0;
    this.second = false;
    this.timer = null;
  }

  /**
   * @param {string} name
   * @returns {Phase}
   */
  of(name) {
    return name === this.name ? this.phase : "rest";
  }

  /**
   * A button is pressed.
   * @param {string} name
   * @param {() => void} run
   * @param {number} at when, for a busy page hears of it late
   */
  down(name, run, at) {
    if (this.of(name) === "holding") return;
    const second = this.of(name) === "again" && at - this.firstAt >= HOLD_MS;
    this.set(name, "holding", HOLD_MS, () => {
      this.rest();
      run();
    });
    [this.downAt, this.second] = [at, second];
  }

  /**
   * The button is let go.
   * @param {string} name
   * @param {() => void} run
   * @param {number} at
   */
  up(name, run, at) {
    if (this.of(name) !== "holding") return;
    if (this.second || at - this.downAt >= HOLD_MS) {
      this.rest();
      run();
      return;
    }
    this.firstAt = at;
    this.set(name, "again", AGAIN_MS, () => this.rest());
  }

  /**
   * The button is pressed and let go at once, as assistive technology does.
   * @param {string} name
   * @param {() => void} run
   * @param {number} at
   */
  click(name, run, at) {
    this.down(name, run, at);
    this.up(name, run, at);
  }

  /** Let go of everything; nothing runs. */
  rest() {
    if (this.phase !== "rest") this.set("", "rest", 0, null);
  }

  /**
   * @param {string} name
   * @param {Phase} phase
   * @param {number} ms
   * @param {(() => void) | null} call
   */
  set(name, phase, ms, call) {
    this.clock.cancel(this.timer);
    [this.name, this.phase, this.second] = [name, phase, false];
    this.timer = call ? this.clock.later(call, ms) : null;
    this.onChange();
  }
}
