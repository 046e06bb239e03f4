// @ts-check
// Again: a run of a request, twice, plain and steered: what came of each, and where the two differ. Pure.

/**
 * @typedef {import("./protocol.js").AgainNews} AgainNews
 * @typedef {"plain" | "steered"} SideName
 * @typedef {object} Side
 * @property {string} request its id at the hub; empty until it is there
 * @property {[number[], string][]} pieces the token ids and the text of each
 * @property {number} tokens
 * @property {boolean} over
 * @property {string | null} finish why it ended
 * @property {string} error why it failed; empty otherwise
 */

/** @type {SideName[]} */
export const SIDES = ["plain", "steered"];

export class Run {
  /**
   * @param {number} id
   * @param {string} label what steers, in words
   */
  constructor(id, label) {
    this.id = id;
    this.label = label;
    /** Why it was refused, or lost; empty otherwise. */
    this.error = "";
    /** @type {Record<SideName, Side>} */
    this.sides = { plain: side(), steered: side() };
  }

  get over() {
    return this.error !== "" || SIDES.every((name) => this.sides[name].over);
  }

  /**
   * Take news of this run.
   * @param {AgainNews} news
   */
  take(news) {
    if (news.id !== this.id) return;
    this.error = news.error ?? this.error;
    for (const name of SIDES) {
      const part = news[name];
      if (!part) continue;
      const mine = this.sides[name];
      for (const piece of part.pieces) {
        mine.pieces.push(piece);
        mine.tokens += piece[0].length;
      }
      const { request, over, finish, error } = part;
      Object.assign(mine, { request, over, finish, error });
    }
  }

  /** Note that no more news comes. @param {string} error */
  lose(error) {
    if (!this.over) this.error = error;
  }

  /**
   * The number of the first token that differs, from 0, once both sides have one there or have ended; -1 before that
   * and if there is none.
   */
  get difference() {
    const [a, b] = SIDES.map((name) => this.sides[name].pieces.flatMap(([ids]) => ids));
    const at = a.findIndex((id, i) => i < b.length && id !== b[i]);
    if (at >= 0 || a.length === b.length) return at;
    const [shorter, length] = a.length < b.length ? ["plain", a.length] : ["steered", b.length];
    const { finish } = this.sides[/** @type {SideName} */ (shorter)];
    // At its limit of tokens it did not end by itself, and with an error it might have gone on.
    return finish && finish !== "length" ? length : -1;
  }
}

/** @returns {Side} */
function side() {
  return { request: "", pieces: [], tokens: 0, over: false, finish: null, error: "" };
}

/**
 * Return the text before a token, the piece with it, and the text behind; without it all of the text comes first.
 * @param {Side} side
 * @param {number} token its number, from 0; -1 for none
 * @returns {[string, [number[], string] | null, string]}
 */
export function split({ pieces }, token) {
  let [at, end] = [0, 0];
  while (token >= 0 && at < pieces.length) {
    end += pieces[at][0].length;
    if (end > token) break;
    at += 1;
  }
  const text = (/** @type {[number[], string][]} */ some) => some.map((piece) => piece[1]).join("");
  if (token < 0 || at === pieces.length) return [text(pieces), null, ""];
  return [text(pieces.slice(0, at)), pieces[at], text(pieces.slice(at + 1))];
}
