// The list of requests, newest first.

import { roving, stopAt } from "./keys.js";

const MARKS = { live: "●", stop: "✓", length: "✓", abort: "✕", error: "✕" };
const WORDS = { live: "live", stop: "done", length: "done, at its length limit", abort: "aborted", error: "error" };

/** Return the mark and the word for a request's status. */
export function statusOf(request) {
  return { mark: MARKS[request.status] ?? "✓", word: WORDS[request.status] ?? request.status };
}

export class RequestList {
  constructor(element, onChosen) {
    this.element = element;
    // Options by key.
    this.items = new Map();
    // Summaries by key.
    this.requests = new Map();
    this.shown = 0;
    roving(element, (option) => onChosen(Number(option.dataset.key)));
    element.addEventListener("click", (event) => {
      const option = event.target.closest("[role=option]");
      if (option) onChosen(Number(option.dataset.key));
    });
  }

  clear() {
    this.requests.clear();
    this.items.clear();
    this.element.replaceChildren();
  }

  update(changed, gone) {
    for (const key of gone) {
      this.requests.delete(key);
      this.items.get(key)?.remove();
      this.items.delete(key);
    }
    for (const request of changed) {
      this.requests.set(request.key, request);
      this.draw(request);
    }
    if (!this.element.querySelector('[tabindex="0"]')) stopAt(this.element, this.element.firstElementChild);
  }

  /** Return the key of the newest running request, or of the newest; 0 if there is none. */
  newest() {
    const keys = [...this.requests.keys()];
    const live = keys.filter((key) => this.requests.get(key).status === "live");
    return Math.max(0, ...(live.length ? live : keys));
  }

  show(key) {
    this.items.get(this.shown)?.setAttribute("aria-selected", "false");
    this.shown = key;
    const item = this.items.get(key);
    item?.setAttribute("aria-selected", "true");
    if (item && !this.element.contains(document.activeElement)) {
      stopAt(this.element, item);
      item.scrollIntoView({ block: "nearest" });
    }
  }

  draw(request) {
    let item = this.items.get(request.key);
    if (!item) {
      item = document.createElement("div");
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", String(request.key === this.shown));
      item.tabIndex = -1;
      item.className = "request";
      item.dataset.key = request.key;
      for (const name of ["mark", "name", "size", "when"]) {
        const part = document.createElement("span");
        part.className = name;
        item.append(part);
      }
      const after = [...this.items.keys()].filter((key) => key < request.key);
      this.element.insertBefore(item, after.length ? this.items.get(Math.max(...after)) : null);
      this.items.set(request.key, item);
    }
    const { mark, word } = statusOf(request);
    item.dataset.status = request.status;
    const generated = Math.max(0, request.tokens - request.prompt_length);
    const [markPart, namePart, sizePart, whenPart] = item.children;
    markPart.textContent = mark;
    markPart.title = word;
    namePart.textContent = request.id;
    namePart.title = request.id;
    sizePart.textContent = `${Math.min(request.tokens, request.prompt_length)} + ${generated}`;
    sizePart.title = "prompt and generated tokens";
    whenPart.textContent = new Date(request.started_s * 1000).toLocaleTimeString([], { hour12: false });
    item.setAttribute(
      "aria-label",
      `${request.id}, ${word}, ${request.prompt_length} prompt and ${generated} generated tokens`,
    );
  }
}
