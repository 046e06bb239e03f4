// @ts-check
// Mutes: which rules of alerts are silent in this browser, and until when. Pure but for the storage that it is given.
//
// A mute belongs to the text of a rule, so a rule that is changed is heard again. Without a storage, mutes end with the
// page.

const KEY = "capflow-mutes";
const MUTES_MAX = 64;

/** @typedef {{name: string, text: string}} Rule */

export class Mutes {
  /**
   * @param {Pick<Storage, "getItem" | "setItem"> | null} storage
   * @param {() => number} [now] milliseconds since 1970
   */
  constructor(storage, now = () => Date.now()) {
    this.storage = storage;
    this.now = now;
    /** Until when each is muted, in milliseconds since 1970; 0 without an end. @type {Record<string, number>} */
    this.kept = {};
  }

  /**
   * Return until when a rule is muted, in milliseconds since 1970: 0 without an end, null if it is not.
   * @param {Rule} rule
   */
  until(rule) {
    return this.read()[nameOf(rule)] ?? null;
  }

  /**
   * Mute a rule for a time in milliseconds, 0 without an end; null ends it.
   * @param {Rule} rule
   * @param {number | null} ms
   */
  mute(rule, ms) {
    const { [nameOf(rule)]: _, ...others } = this.read();
    const latest = Object.entries(others).slice(1 - MUTES_MAX);
    this.kept = Object.fromEntries(latest);
    if (ms !== null) this.kept[nameOf(rule)] = ms && this.now() + ms;
    try {
      this.storage?.setItem(KEY, JSON.stringify(this.kept));
    } catch {
      // There is no room, or no right: the page goes on without.
      this.storage = null;
    }
  }

  /** Return the mutes that hold; other pages of this browser may have changed them. */
  read() {
    try {
      const text = this.storage?.getItem(KEY);
      if (text) this.kept = JSON.parse(text);
    } catch {
      this.storage = null;
    }
    const holds = Object.entries(this.kept ?? {}).filter(
      ([, until]) => until === 0 || (typeof until === "number" && until > this.now()),
    );
    return Object.fromEntries(holds);
  }
}

/** @param {Rule} rule */
function nameOf({ name, text }) {
  return `${name}: ${text}`;
}
