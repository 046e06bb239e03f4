// @ts-check
// Actions: the last actions of this page and their answers. Pure.

/**
 * @typedef {"pending" | "applied" | "rejected" | "unknown" | "waiting" | "silent" | "unsent"} State
 * @typedef {{id: number, what: string, moves: boolean, state: State, sentAt: number, atS: number,
 *   step: number | null, position: number | null, reason: string}} Entry
 */

export const SHOWN_MAX = 20;
export const ANSWER_MS = 15_000;

export class Actions {
  constructor() {
    /** Newest first. @type {Entry[]} */
    this.entries = [];
  }

  get pending() {
    return this.entries.some((entry) => entry.state === "pending");
  }

  /**
   * Note an action.
   * @param {number} id
   * @param {string} what
   * @param {{now: number, atS: number, moves?: boolean, sent?: boolean}} facts
   *   moves: it is a move of the slider, which replaces the one before it; atS: seconds since 1970
   */
  add(id, what, { now, atS, moves = false, sent = true }) {
    if (moves && this.entries[0]?.moves) this.entries.shift();
    const state = sent ? "pending" : "unsent";
    this.entries.unshift({ id, what, moves, state, sentAt: now, atS, step: null, position: null, reason: "" });
    this.entries.length = Math.min(this.entries.length, SHOWN_MAX);
  }

  /**
   * Take an answer; return its entry if it is shown.
   * @param {import("./protocol.js").Ack} ack
   */
  take(ack) {
    const entry = this.entries.find((one) => one.id === ack.id);
    if (!entry) return null;
    const { state, step = null, position = null, reason = "" } = ack;
    return Object.assign(entry, { state, step, position, reason });
  }

  /**
   * Give up on actions that got no answer in time; return them.
   * @param {number} now
   */
  expire(now) {
    const late = this.entries.filter((entry) => entry.state === "pending" && now - entry.sentAt >= ANSWER_MS);
    for (const entry of late) entry.state = "silent";
    return late;
  }
}

/**
 * Return the state of an action in words.
 * @param {Entry} entry
 */
export function stateText({ state, step, position, reason }) {
  const why = reason ? `: ${reason}` : "";
  switch (state) {
    case "pending":
      return "pending";
    case "silent":
      return `no answer after ${ANSWER_MS / 1000} s`;
    case "unsent":
      return "not sent: no connection to capflow";
    case "applied": {
      const from = position === null ? "" : ` from position ${position.toLocaleString("en")}`;
      return `applied${step === null ? "" : ` in step ${step.toLocaleString("en")}${from}`}${why}`;
    }
    default:
      return `${state}${why}`;
  }
}
