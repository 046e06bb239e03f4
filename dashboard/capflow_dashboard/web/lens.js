// @ts-check
// Lens: what is asked for about one token and never sent by itself: its lens, which is what each layer would
// predict next, or where its rows are stored.

/** @typedef {import("./protocol.js").LensLayer} LensLayer */

/** A newer question replaces one that waits, which then has no answer. */
const ANSWER_MS = 60_000;

/** @template {{id: number, error: string}} [A=import("./protocol.js").LensAnswer] */
export class Lens {
  /**
   * @param {(message: object) => boolean} send
   * @param {() => void} onChange
   * @param {"lens" | "stored"} [kind] of the message
   */
  constructor(send, onChange, kind = "lens") {
    this.send = send;
    this.onChange = onChange;
    this.kind = kind;
    this.id = 0;
    /** What is shown: the token, and its answer once it is there.
     * @type {{request: number, position: number, answer: A | null} | null} */
    this.shown = null;
    /** @type {any} */
    this.timer = null;
  }

  /**
   * Ask for the lens of a token.
   * @param {number} request
   * @param {number} position
   */
  ask(request, position) {
    this.id += 1;
    this.shown = { request, position, answer: null };
    const sent = this.send({ [this.kind]: { id: this.id, request, position } });
    clearTimeout(this.timer);
    if (!sent) this.fail("There is no connection to capflow.");
    else this.timer = setTimeout(() => this.fail(`No answer within ${ANSWER_MS / 1000} s.`), ANSWER_MS);
    this.onChange();
  }

  /** @param {A} answer */
  take(answer) {
    if (answer.id !== this.id || !this.shown) return;
    clearTimeout(this.timer);
    this.shown.answer = answer;
    this.onChange();
  }

  /** @param {string} error */
  fail(error) {
    if (this.shown && !this.shown.answer)
      this.take(/** @type {any} */ ({ id: this.id, layers: [], stores: [], error }));
  }

  /** Forget it: the connection is another one. */
  clear() {
    clearTimeout(this.timer);
    this.shown = null;
  }
}

/**
 * Return the layers, the last first, and whether the first token of each differs from that of the layer below. Layers
 * without tokens are passed over.
 * @param {LensLayer[]} layers
 */
export function changes(layers) {
  /** @type {number | undefined} */ let below;
  const rows = [];
  for (const layer of [...layers].sort((a, b) => a.layer - b.layer)) {
    const first = layer.tokens[0]?.[0];
    rows.unshift({ layer, changed: first !== undefined && below !== undefined && first !== below });
    below = first ?? below;
  }
  return rows;
}

/** @param {number} probability */
export function percentText(probability) {
  const percent = probability * 100;
  return percent >= 9.95 ? `${Math.round(percent)} %` : percent >= 0.095 ? `${percent.toFixed(1)} %` : "< 0.1 %";
}
