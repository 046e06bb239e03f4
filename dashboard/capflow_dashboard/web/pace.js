// @ts-check
// Pace: sends what changes often at most four times a second, the last value always. Pure but for its clock.

import { CLOCK } from "./press.js";

export const GAP_MS = 250;

/** @template T */
export class Pace {
  /**
   * @param {(value: T) => void} send
   * @param {import("./press.js").Clock} [clock]
   */
  constructor(send, clock = CLOCK) {
    this.send = send;
    this.clock = clock;
    this.sentAt = -Infinity;
    /** The value that waits. @type {{value: T} | null} */
    this.next = null;
    this.timer = null;
  }

  /** @param {T} value */
  offer(value) {
    const waitMs = this.sentAt + GAP_MS - this.clock.now();
    if (waitMs <= 0) this.flush(value);
    else {
      if (!this.next) this.timer = this.clock.later(() => this.next && this.flush(this.next.value), waitMs);
      this.next = { value };
    }
  }

  /** @param {T} value */
  flush(value) {
    this.drop();
    this.sentAt = this.clock.now();
    this.send(value);
  }

  /** Forget the value that waits. */
  drop() {
    this.clock.cancel(this.timer);
    [this.next, this.timer] = [null, null];
  }
}
