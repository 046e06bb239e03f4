// @ts-check
// Stored: where the rows of the chosen token are stored, and the line of Python that reads the row of a site.

import { count, visible } from "./format.js";
import { Lens } from "./lens.js";
import { html, nothing } from "./lit.js";

/**
 * @typedef {{consumer: string, kind: "filesystem" | "duckdb", path: string, layout?: string, expression?: string,
 *   rows?: [string, number, string][], note?: string, command?: string}} RowStore rows: site, index and file of each
 * @typedef {{id: number, request: number, position: number, stores: RowStore[], error: string}} StoredAnswer
 */

const SITES_SHOWN = 8;

/** @extends {Lens<StoredAnswer>} */
export class Stored extends Lens {
  /**
   * @param {(message: object) => boolean} send
   * @param {() => void} onChange
   */
  constructor(send, onChange) {
    super(send, onChange, "stored");
    /** Whether the section is open: only then something is asked. */
    this.open = false;
    /** The text that was copied last. */
    this.copied = "";
  }

  /** @param {boolean} open */
  toggle(open) {
    this.open = open;
    this.onChange();
  }

  /**
   * Ask for a token that is chosen, once.
   * @param {number} request
   * @param {number} position
   */
  follow(request, position) {
    if (this.shown?.request !== request || this.shown.position !== position) this.ask(request, position);
  }
}

/**
 * Return the Python that reads the row of a site; null if the store has none.
 * @param {RowStore} store
 * @param {string} site
 * @param {number} position
 */
export function lineOf({ expression, rows }, site, position) {
  if (!expression) return null;
  const request = `${expression}["${site}"]`;
  if (!rows) return `import capflow\nrows = ${request}\nrows.rows[rows.positions == ${position}][0]`;
  const row = rows.find(([name]) => name === site);
  return row ? `import capflow\n${request}.rows[${row[1]}]` : null;
}

/**
 * The section of the token's panel.
 * @param {import("./page.js").Page} page
 * @param {import("./detail.js").Detail} detail
 * @param {number} column
 */
export function storedSection(page, detail, column) {
  const { stored, cursor } = page;
  if (!stored || page.store.hello?.stored !== true) return nothing;
  const position = detail.base + column;
  const chosen = cursor === column;
  if (stored.open && chosen) queueMicrotask(() => stored.follow(page.key, position));
  const mine = stored.shown?.request === page.key && stored.shown.position === position;
  const answer = mine ? (stored.shown?.answer ?? null) : null;
  const site = detail.series[page.layer]?.site ?? "";
  const toggle = (/** @type {any} */ event) => {
    if (event.target.open !== stored.open) stored.toggle(event.target.open);
  };
  const body = () => {
    if (!chosen) return html`<p class="soft">Click a token to see where its rows are stored.</p>`;
    if (!answer) return html`<p class="soft" role="status">Looking…</p>`;
    const none = answer.stores.length || answer.error ? "" : "No consumer of the hub stores rows.";
    return html`${answer.error ? html`<p class="bad">${visible(answer.error)}</p>` : nothing}
      ${answer.stores.map((store) => section(stored, store, site, position))}<p class="soft">${none}</p>
      <button type="button" class="small" id="stored-again" @click=${() =>
        stored.ask(page.key, position)}>Look again</button>`;
  };
  return html`<details class="stored" id="stored" ?open=${stored.open} @toggle=${toggle}><summary>On disk</summary>${
    stored.open ? body() : nothing
  }</details>`;
}

/**
 * @param {Stored} stored
 * @param {RowStore} store
 * @param {string} site
 * @param {number} position
 */
function section(stored, store, site, position) {
  const { consumer, kind, path, layout, rows, note, command } = store;
  const row = rows?.find(([name]) => name === site);
  const line = lineOf(store, site, position);
  const sites = rows?.map(([name]) => name) ?? [];
  const more = sites.length > SITES_SHOWN ? ` and ${count(sites.length - SITES_SHOWN)} more` : "";
  const named = `${sites.slice(0, SITES_SHOWN).join(", ")}${more}`;
  const missing = `No row of ${site || "this token"} is stored. Stored: ${named}.`;
  return html`<section class="store" data-kind=${kind}><h4>${
    kind === "duckdb" ? "Scores in DuckDB" : "Rows in a data set"
  }${consumer ? html` <span class="soft">of <bdi>${visible(consumer)}</bdi></span>` : nothing}</h4>
    <dl class="pairs"><dt>${row ? "file" : "path"}</dt><dd><bdi class="path">${visible(row?.[2] ?? path)}</bdi></dd>${
      row
        ? html`<dt>index</dt><dd class="stored-row">${row[1]} of ${site}<span class="soft">, ${layout}</span></dd>`
        : nothing
    }</dl>
    ${note ? html`<p class="soft stored-note">${visible(note)}</p>` : nothing}
    ${rows && !row ? html`<p class="soft stored-note">${missing}</p>` : nothing}
    ${line ? code(stored, line, "Python") : nothing}${command ? code(stored, command, "Command") : nothing}</section>`;
}

/**
 * @param {Stored} stored
 * @param {string} text
 * @param {string} name
 */
function code(stored, text, name) {
  return html`<div class="code"><pre tabindex="0" role="region" aria-label=${name}>${text}</pre><button type="button"
    class="small" aria-label="Copy: ${name}" @click=${(/** @type {any} */ event) =>
      copy(stored, text, event.target.previousElementSibling)}>${stored.copied === text ? "✓" : "Copy"}</button></div>`;
}

/**
 * Copy a text; a browser that does not allow it shows it chosen, to be copied by hand.
 * @param {Stored} stored
 * @param {string} text
 * @param {Element} box
 */
async function copy(stored, text, box) {
  try {
    await navigator.clipboard.writeText(text);
    stored.copied = text;
    stored.onChange();
  } catch {
    getSelection()?.selectAllChildren(box);
  }
}
