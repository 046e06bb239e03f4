// @ts-check
// Tokens: the shown request as coloured text, in chunks. A chunk gets its elements when it comes into view, and its
// colours when it is in view; the rest costs nothing. Of a long request, chunks out of view lose their elements.
//
// Invariant: which tokens a chunk has never changes, so that text does not move when more comes.

import { tokenText } from "./format.js";
import { ABSENT, ODD } from "./scale.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {{first: number, end: number, box: HTMLElement, elements: HTMLElement[], filled: boolean, seen: boolean}}
  Chunk */

const CHUNK_TOKENS = 256;
/** From this size on a chunk ends where a line does. */
const CHUNK_TOKENS_MIN = 96;
const [FIRES, STEERED, NO_TEXT] = [1 << 8, 1 << 9, 1 << 10];
const AHEAD = "600px";
/** Text that is so near its end follows it. */
const END_PX = 64;
/** A request with no more chunks keeps them all, so that the browser's search finds every word. */
const CHUNKS_KEPT = 32;

const blank = document.createElement("span");
blank.className = "t";
blank.setAttribute("role", "option");

export class Tokens {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    /** @type {Chunk[]} */
    this.chunks = [];
    /** @type {Map<Element, Chunk>} */
    this.byBox = new Map();
    /** The look of each token, so that only changes are written. */
    this.looks = new Int32Array(1024).fill(-1);
    this.count = 0;
    this.prompt = part("prompt", "Prompt");
    this.generated = part("generated", "Generated");
    this.before = document.createElement("p");
    this.before.className = "soft before";
    this.end = document.createElement("div");
    this.end.className = "end";
    box.append(this.before, this.prompt.box, this.generated.box, this.end);
    /** Whether new tokens move the text. */
    this.sticks = true;
    /** Whether the text was scrolled to the cursor, and nobody has done anything since. */
    this.keeps = false;
    /** @type {HTMLElement | null} */
    this.marked = null;
    /** @type {HTMLElement | null} */
    this.pointed = null;
    /** @type {MouseEvent | null} The last click. */
    this.clicked = null;
    this.lineX = NaN;
    this.look = new IntersectionObserver((entries) => this.onSeen(entries), { root: null, rootMargin: AHEAD });
    new IntersectionObserver(([entry]) => (this.sticks = entry.isIntersecting), {
      root: box,
      rootMargin: `0px 0px ${END_PX}px 0px`,
    }).observe(this.end);
    // After the layout of a frame, so that none is forced. Far more than there is: the browser stops at the end.
    const follow = new ResizeObserver(() => {
      if (this.sticks && page.request?.status === "live") box.scrollTop = 1e9;
      else if (this.keeps) this.keep();
    });
    for (const each of [box, this.prompt.box, this.generated.box]) follow.observe(each);
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      document.addEventListener(kind, () => (this.keeps = false), { capture: true, passive: true });
    }
    box.addEventListener("pointerover", (event) => {
      // Text that moves below a pointer at rest does not take the place of the token that it clicked. A click has whole
      // coordinates.
      const { clientX, clientY } = this.clicked ?? { clientX: NaN, clientY: NaN };
      const rests = Math.hypot(event.clientX - clientX, event.clientY - clientY) < 2;
      if (!rests) page.over(this.columnOf(event.target));
    });
    box.addEventListener("pointerleave", () => page.over(null));
    box.addEventListener("click", (event) => {
      this.clicked = event;
      const column = this.columnOf(event.target);
      if (column !== null && !getSelection()?.toString()) page.point(column);
    });
    box.addEventListener("keydown", (event) => this.onKey(event));
    box.addEventListener("focus", () => {
      if (page.cursor === null && page.detail) page.point(0);
    });
  }

  /** Start again with another request. */
  clear() {
    // While nothing has changed yet: later it would cost a layout.
    this.box.scrollTop = 0;
    this.look.disconnect();
    this.chunks = [];
    this.byBox.clear();
    this.looks.fill(-1);
    this.count = 0;
    [this.marked, this.pointed] = [null, null];
    this.keeps = false;
    this.prompt.run.replaceChildren();
    this.generated.run.replaceChildren();
    this.sticks = this.page.request?.status === "live";
  }

  /**
   * Write the columns [first, end) of the detail.
   * @param {number} first
   * @param {number} end
   */
  write(first, end) {
    const { detail, request } = this.page;
    if (!detail) return;
    const prompt = Math.max(0, (request?.prompt_length ?? Infinity) - detail.base);
    this.before.hidden = detail.base === 0;
    this.before.textContent = `Positions 0 to ${detail.base - 1} are not kept.`;
    for (let column = this.count; column < detail.count; column++) {
      const chunk = this.chunks.at(-1);
      const size = chunk ? chunk.end - chunk.first : 0;
      const lineEnds = size >= CHUNK_TOKENS_MIN && detail.texts[column - 1]?.endsWith("\n");
      if (!chunk || size >= CHUNK_TOKENS || lineEnds || column === prompt) this.open(column, column < prompt);
      /** @type {Chunk} */ (this.chunks.at(-1)).end = column + 1;
    }
    this.count = detail.count;
    if (this.looks.length < this.count) {
      const looks = new Int32Array(this.count * 2).fill(-1);
      looks.set(this.looks);
      this.looks = looks;
    }
    this.looks.fill(-1, first, end);
    for (let i = this.chunks.length - 1; i >= 0 && this.chunks[i].end > first; i--) {
      const chunk = this.chunks[i];
      if (chunk.filled && chunk.first < end) this.fill(chunk, first, end);
    }
    this.prompt.box.hidden = !this.prompt.run.firstChild;
    this.generated.box.hidden = !this.generated.run.firstChild;
  }

  /**
   * @param {number} first
   * @param {boolean} prompt
   */
  open(first, prompt) {
    const box = document.createElement("div");
    box.className = "chunk";
    const chunk = { first, end: first, box, elements: [], filled: false, seen: false };
    (prompt ? this.prompt : this.generated).run.append(box);
    this.chunks.push(chunk);
    this.byBox.set(box, chunk);
    // The first ones are in view, and are not to be waited for.
    if (this.chunks.length <= 4) chunk.filled = chunk.seen = true;
    this.look.observe(box);
  }

  /** @param {IntersectionObserverEntry[]} entries */
  onSeen(entries) {
    for (const entry of entries) {
      const chunk = this.byBox.get(entry.target);
      if (!chunk) continue;
      chunk.seen = entry.isIntersecting;
      if (!chunk.seen) {
        this.empty(chunk);
        continue;
      }
      if (!chunk.filled) {
        chunk.filled = true;
        this.fill(chunk, chunk.first, chunk.end);
      }
      this.page.frames.draw("text-colours");
    }
  }

  /**
   * Take the elements of a chunk that is out of view, if there are many chunks; the browser remembers its size.
   * @param {Chunk} chunk
   */
  empty(chunk) {
    const { cursor } = this.page;
    const holds = cursor !== null && cursor >= chunk.first && cursor < chunk.end;
    if (!chunk.filled || holds || this.chunks.length <= CHUNKS_KEPT || chunk === this.chunks.at(-1)) return;
    chunk.filled = false;
    chunk.elements = [];
    chunk.box.replaceChildren();
  }

  /**
   * Write the texts of a chunk's columns in [first, end).
   * @param {Chunk} chunk
   * @param {number} first
   * @param {number} end
   */
  fill(chunk, first, end) {
    const { detail } = this.page;
    if (!detail) return;
    const missing = chunk.end - chunk.first - chunk.elements.length;
    if (missing > 0) {
      const fragment = document.createDocumentFragment();
      for (let i = 0; i < missing; i++) {
        const element = /** @type {HTMLElement} */ (blank.cloneNode());
        chunk.elements.push(element);
        fragment.append(element);
      }
      chunk.box.append(fragment);
      first = Math.min(first, chunk.end - missing);
    }
    for (let column = Math.max(first, chunk.first); column < Math.min(end, chunk.end); column++) {
      const text = tokenText(detail.texts[column], detail.ids[column]);
      const element = chunk.elements[column - chunk.first];
      if (element.textContent !== text) {
        element.textContent = text;
        if (!text.trim()) element.setAttribute("aria-label", text.length === 1 ? "space" : `${text.length} spaces`);
        else element.removeAttribute("aria-label");
      }
      this.looks[column] = -1;
    }
  }

  /** Colour the tokens in view. */
  paint() {
    const { page } = this;
    const { detail, measured } = page;
    if (!detail || measured < 0) return;
    const scale = page.scale(measured);
    const values = detail.values[measured];
    const { pool, probe } = detail.series[measured];
    const threshold = probe && pool === "token" ? page.threshold(measured) : Infinity;
    this.box.classList.toggle("div", scale.diverging);
    this.box.classList.toggle("seq", !scale.diverging);
    for (const chunk of this.chunks) {
      if (!chunk.seen || !chunk.filled) continue;
      for (let column = chunk.first; column < chunk.end; column++) {
        const value = values[column];
        let look = scale.step(value) + 3;
        if (value >= threshold && value !== Infinity) look |= FIRES;
        if (detail.steered[column]) look |= STEERED;
        if (!detail.texts[column]) look |= NO_TEXT;
        if (look === this.looks[column]) continue;
        this.looks[column] = look;
        const element = chunk.elements[column - chunk.first];
        if (element) element.className = this.nameOf(look) + (element === this.marked ? " at" : "");
      }
    }
  }

  /** @param {number} look */
  nameOf(look) {
    const step = (look & 255) - 3;
    let name = step >= 0 ? `t c${step}` : step === ODD ? "t odd" : step === ABSENT ? "t gone" : "t";
    if (look & FIRES) name += " fires";
    if (look & STEERED) name += " steered";
    if (look & NO_TEXT) name += " bare";
    return name;
  }

  /** Mark the token of the cursor, and that under the pointer. */
  drawCursor() {
    const { page } = this;
    const at = page.cursor === null ? null : this.element(page.cursor);
    if (at !== this.marked) {
      this.marked?.classList.remove("at");
      this.marked?.setAttribute("aria-selected", "false");
      this.marked = at;
      at?.classList.add("at");
      at?.setAttribute("aria-selected", "true");
      if (at) at.id = `token-${page.cursor}`;
      if (at) this.box.setAttribute("aria-activedescendant", at.id);
      else this.box.removeAttribute("aria-activedescendant");
    }
    const over = page.hover === null ? null : this.element(page.hover, false);
    if (over !== this.pointed) {
      this.pointed?.classList.remove("over");
      this.pointed = over;
      over?.classList.add("over");
    }
  }

  /**
   * Return the element of a column.
   * @param {number} column
   * @param {boolean} [make] whether its chunk is to be filled for it
   */
  element(column, make = true) {
    const chunk = this.chunkOf(column);
    if (!chunk) return null;
    if (!chunk.filled && make) {
      chunk.filled = true;
      this.fill(chunk, chunk.first, chunk.end);
    }
    return chunk.elements[column - chunk.first] ?? null;
  }

  /** @param {number} column */
  chunkOf(column) {
    let [low, high] = [0, this.chunks.length - 1];
    while (low <= high) {
      const middle = (low + high) >> 1;
      const chunk = this.chunks[middle];
      if (column < chunk.first) high = middle - 1;
      else if (column >= chunk.end) low = middle + 1;
      else return chunk;
    }
    return null;
  }

  /** @param {EventTarget | null} target */
  columnOf(target) {
    if (!(target instanceof HTMLElement) || !target.classList.contains("t")) return null;
    const chunk = this.byBox.get(/** @type {Element} */ (target.parentElement));
    return chunk ? chunk.first + chunk.elements.indexOf(target) : null;
  }

  /**
   * Put the cursor on a column and scroll the text there.
   * @param {number} column
   */
  go(column) {
    this.page.point(column);
    this.scroll("nearest");
  }

  /** Scroll the text to the cursor. */
  reveal() {
    this.scroll("center");
  }

  /**
   * Scroll the text to the cursor, and let it `keep` there: parts out of view have only a size that is guessed.
   * @param {"nearest" | "center"} block
   */
  scroll(block) {
    const { cursor } = this.page;
    const element = cursor === null ? null : this.element(cursor);
    if (!element) return;
    element.scrollIntoView({ block, inline: "nearest" });
    this.keeps = true;
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    this.sticks = scrollHeight - scrollTop - clientHeight <= END_PX;
  }

  /** Scroll nothing but the text, and no further than needed, so that the cursor is in view. */
  keep() {
    const { cursor } = this.page;
    const token = cursor === null ? null : this.element(cursor)?.getBoundingClientRect();
    if (!token) return;
    const { top, bottom } = this.box.getBoundingClientRect();
    this.box.scrollTop += Math.min(token.top - top, Math.max(0, token.bottom - bottom));
  }

  /**
   * Return the column below or above in the text as it is laid out.
   * @param {number} column
   * @param {1 | -1} way
   */
  line(column, way) {
    const start = this.element(column)?.getClientRects();
    if (!start?.length) return column;
    const from = way > 0 ? start[start.length - 1] : start[0];
    if (Number.isNaN(this.lineX)) this.lineX = (from.left + from.right) / 2;
    let [best, distance, top] = [column, Infinity, NaN];
    for (let at = column + way; at >= 0 && at < this.count; at += way) {
      const rects = this.element(at)?.getClientRects() ?? [];
      for (const rect of way > 0 ? rects : [...rects].reverse()) {
        // Tokens of one line may differ in height by a little.
        const beyond = way > 0 ? rect.top > from.top + from.height / 2 : rect.top < from.top - from.height / 2;
        if (!beyond || (rect.width === 0 && rects.length > 1)) continue;
        if (Number.isNaN(top)) top = rect.top;
        if (Math.abs(rect.top - top) > from.height / 2) return best;
        const off = this.lineX < rect.left ? rect.left - this.lineX : Math.max(0, this.lineX - rect.right);
        if (off < distance) [best, distance] = [at, off];
      }
    }
    return best;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.altKey || event.metaKey || event.shiftKey) return;
    const { page } = this;
    const at = page.cursor ?? 0;
    const { key } = event;
    if (event.ctrlKey && key !== "Home" && key !== "End") return;
    if (key === "ArrowUp" || key === "ArrowDown") {
      this.go(this.line(at, key === "ArrowDown" ? 1 : -1));
    } else {
      const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity }[key];
      if (step === undefined) return;
      this.lineX = NaN;
      this.go(at + step);
    }
    event.preventDefault();
    event.stopPropagation();
  }
}

/**
 * @param {string} kind
 * @param {string} name
 */
function part(kind, name) {
  const box = document.createElement("div");
  box.className = `part ${kind}`;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", name);
  const title = document.createElement("span");
  title.className = "part-name";
  title.setAttribute("aria-hidden", "true");
  title.textContent = kind;
  const run = document.createElement("div");
  run.className = "run";
  run.setAttribute("role", "presentation");
  box.append(title, run);
  return { box, run };
}
