// @ts-check
// Later: a part of the page that is loaded when it is first needed: its modules and its style sheets.
//
// Invariant: a part is shown with its style sheets or not at all. One that could not be loaded can be tried again.

import { html } from "./lit.js";

/** How old a page must be to be loaded again, so that it is not loaded without end. */
const AGE_MS = 5000;

/** The style sheets that are loaded or under way, by name. @type {Map<string, Promise<void>>} */
const sheets = new Map();

/**
 * Load a style sheet, once; it fails if the server does not answer.
 * @param {string} name
 * @returns {Promise<void>}
 */
export function style(name) {
  let loaded = sheets.get(name);
  if (!loaded) {
    loaded = new Promise((done, fail) => {
      const link = document.createElement("link");
      link.rel = "stylesheet";
      link.href = name;
      link.onload = () => done();
      link.onerror = () => {
        link.remove();
        sheets.delete(name);
        fail(new Error(`${name} could not be loaded`));
      };
      document.head.append(link);
    });
    sheets.set(name, loaded);
  }
  return loaded;
}

/**
 * Load the page again if the server answers: Firefox remembers that a module could not be loaded as long as the page is
 * open. The address has what is shown.
 */
async function reload() {
  if (performance.now() < AGE_MS) return;
  const answer = await fetch("/session", { cache: "no-store" }).catch(() => null);
  if (answer?.ok) location.reload();
}

/** @template T */
export class Later {
  /**
   * @param {string} name what the page calls it
   * @param {() => Promise<T>} make loads it
   * @param {() => void} changed called when it is there, and when it could not be loaded
   */
  constructor(name, make, changed) {
    this.name = name;
    this.make = make;
    this.changed = changed;
    /** The part; null until it is there. @type {T | null} */
    this.value = null;
    /** Whether the last try failed. */
    this.failed = false;
    this.tries = 0;
    /** @type {Promise<T | null> | null} */
    this.loading = null;
  }

  /** Return the part; null until it is there. The first call begins to load it; after a failure, only `load` does. */
  get() {
    if (!this.value && !this.failed) this.load();
    return this.value;
  }

  /** Load the part, also after a failure; return it, or null if it could not be loaded. */
  load() {
    this.loading ??= this.attempt();
    return this.loading;
  }

  async attempt() {
    this.tries++;
    try {
      this.value = await this.make();
      this.failed = false;
    } catch {
      this.failed = true;
      this.loading = null;
      if (this.tries > 1) reload();
    }
    this.changed();
    return this.value;
  }

  /** Return what stands in place of the part: that it is being loaded, or that it could not be. */
  stead() {
    if (!this.failed) return html`<p class="stead">Loading…</p>`;
    return html`<p class="stead" role="alert">${this.name} could not be loaded: capflow does not answer.
      <button type="button" class="small" @click=${() => {
        this.failed = false;
        this.changed();
        this.load();
      }}>Try again</button></p>`;
  }
}
