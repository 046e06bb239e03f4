// @ts-check
// Desk: what this page may do, holds and asks for, and what all pages hold. It sends and takes messages and draws
// nothing.
//
// Invariant: without the right it sends nothing. What it holds ends by itself if the page is closed: the server and
// the engine let go of what is not renewed.

import { Actions, stateText } from "./actions.js";
import { offerOf } from "./protocol.js";
import { ratioOf, short } from "./ratio.js";

/**
 * @typedef {import("./protocol.js").Held} Held
 * @typedef {object} Doors what the desk reaches the world with
 * @property {(message: object) => boolean} send returns whether there was a connection
 * @property {() => number} now ms
 * @property {() => number} number the next number of an action
 * @property {(call: () => void, ms: number) => any} every
 * @property {(timer: any) => void} stop
 * @property {() => void} changed something is to be drawn
 * @property {(text: string) => void} say to screen readers
 */

export const ALIVE_MS = 1000;

export class Desk {
  /**
   * @param {string} name of this page
   * @param {Doors} doors
   */
  constructor(name, doors) {
    this.name = name;
    this.doors = doors;
    /** What the server offers; null without the right. @type {import("./protocol.js").Offer | null} */
    this.offer = null;
    this.frozen = false;
    /** @type {Held[]} */
    this.holds = [];
    this.actions = new Actions();
    /** The number of a press of the kill switch without an answer, however long ago it was; 0 without one. */
    this.killing = 0;
    /** Numbers of the actions that will hold something, and that the server has not listed yet. */
    this.asked = 0;
    this.aliveAt = -Infinity;
    this.timer = null;
  }

  /** Whether this page may steer. */
  get may() {
    return this.offer !== null;
  }

  /** What this page holds. */
  get own() {
    return this.holds.filter((hold) => hold.page === this.name);
  }

  /**
   * Begin a connection.
   * @param {import("./protocol.js").Hello} hello
   */
  greet(hello) {
    this.offer = offerOf(hello);
    if (!this.may) Object.assign(this, { frozen: false, holds: [], killing: 0, asked: 0 });
    else {
      this.alive();
      if (this.killing) this.killAgain();
    }
    this.run();
    this.doors.changed();
  }

  /**
   * Take answers and holds from a message.
   * @param {import("./protocol.js").Head} head
   */
  take({ acks, steering }) {
    if (!this.may || !(acks || steering)) return;
    for (const ack of acks ?? []) {
      if (ack.id === this.killing) this.killing = 0;
      if (ack.id === this.asked && ack.state !== "waiting") this.asked = 0;
      const before = this.actions.entries.find((entry) => entry.id === ack.id)?.state;
      const entry = this.actions.take(ack);
      // Answers to moves of the slider are not read out while all is well.
      if (entry && before !== entry.state && !(entry.moves && entry.state === "applied"))
        this.doors.say(`${entry.what}: ${stateText(entry)}`);
    }
    if (steering) {
      if (steering.frozen !== this.frozen) {
        this.doors.say(steering.frozen ? "All steering is off" : "Steering is possible again");
      }
      [this.frozen, this.holds] = [steering.frozen, steering.holds];
      this.asked = 0;
      if (this.frozen) this.killing = 0;
    }
    this.run();
    this.doors.changed();
  }

  // Commands.

  /** Take everything back, everywhere, at once. */
  kill() {
    if (!this.may) return;
    // Also while steering is off: without a connection, another page may have released the switch.
    this.killing = this.act("kill", "Stop all steering");
    this.doors.changed();
  }

  /** Send a press that came without a connection, or whose answer was lost: the same number is the same action. */
  killAgain() {
    const entry = this.actions.entries.find((one) => one.id === this.killing);
    if (entry) Object.assign(entry, { state: "pending", sentAt: this.doors.now() });
    this.doors.send({ act: { id: this.killing, kind: "kill" } });
  }

  release() {
    this.act("release", "Release the kill switch");
  }

  /**
   * @param {import("./arming.js").Choice} choice
   * @param {string} where the request
   * @param {boolean} [moves] whether the slider of what is applied was moved
   */
  steer({ request, way, name, percent }, where, moves = false) {
    const fields = { request, name, ratio: ratioOf(percent) };
    const what = `${short(way, name, percent)} on ${where}`;
    if (way === "gain") this.asked = this.act("gain", what, fields, moves);
    else this.asked = this.act("steer", what, { ...fields, mode: way }, moves);
  }

  /**
   * @param {number} request
   * @param {string} where
   */
  unsteer(request, where) {
    this.act("unsteer", `Take back from ${where}`, { request });
  }

  /**
   * @param {number} request
   * @param {string} where
   */
  abort(request, where) {
    this.act("abort", `Abort ${where}`, { request });
  }

  /**
   * Send an action; return its number.
   * @param {string} kind
   * @param {string} what
   * @param {object} [fields]
   * @param {boolean} [moves]
   */
  act(kind, what, fields = {}, moves = false) {
    if (!this.may) return 0;
    const id = this.doors.number();
    const now = this.doors.now();
    const sent = this.doors.send({ act: { id, kind, ...fields } });
    this.actions.add(id, what, { now, atS: Date.now() / 1000, moves, sent });
    if (!sent) this.doors.say(`${what}: ${stateText(this.actions.entries[0])}`);
    this.run(sent);
    this.doors.changed();
    return sent || kind === "kill" ? id : 0;
  }

  // Being alive.

  /** Whether something ends if this page is not alive. */
  get holding() {
    return this.may && (this.asked !== 0 || this.own.length > 0);
  }

  /** Let the clock run while something is held or without an answer. */
  run(waits = false) {
    const needed = waits || this.holding || this.actions.pending;
    if (needed && this.timer === null) this.timer = this.doors.every(() => this.beat(), ALIVE_MS);
    if (!needed && this.timer !== null) {
      this.doors.stop(this.timer);
      this.timer = null;
    }
  }

  /** Say that this page is alive, and note what has no answer. Called each second and with each message. */
  beat() {
    const late = this.actions.expire(this.doors.now());
    for (const entry of late) {
      if (entry.id === this.asked) this.asked = 0;
      // A kill without an answer is kept: the connection is dead, and the next one gets it.
      this.doors.say(`${entry.what}: ${stateText(entry)}`);
    }
    // Browsers slow the timers of hidden pages down; messages still come, each second at least.
    if (this.holding && this.doors.now() - this.aliveAt >= ALIVE_MS * 0.9) this.alive();
    this.run();
    if (late.length) this.doors.changed();
  }

  alive() {
    this.aliveAt = this.doors.now();
    this.doors.send({ alive: this.name });
  }
}
