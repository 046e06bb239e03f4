// @ts-check
// List: the table of requests. Only the rows in view have elements; there may be thousands.

import { clock, count, duration, number, plural, short, visible } from "./format.js";
import { spark } from "./header.js";
import { holdText } from "./holds.js";
import { html, nothing, render, repeat } from "./lit.js";
import { ordered } from "./order.js";
import { statusOf } from "./page.js";
import { nameOf } from "./place.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./protocol.js").RequestSummary} RequestSummary */

const ROW_PX = 34;
const CARD_PX = 58;
const SPARE_ROWS = 6;
/** From this width on the list is a table, below it is cards. */
const TABLE_PX = 760;
const WINDOW_MAX = 64;

export class List {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    /** The keys in the order shown. @type {number[]} */
    this.keys = [];
    /** What the order was made of. */
    this.made = "";
    /** How many changes to the order are held back. */
    this.behind = 0;
    /** @type {string[]} */
    this.errors = [];
    this.wide = false;
    this.viewPx = 0;
    /** The keys of the rows in view. @type {number[]} */
    this.window = [];
    render(this.frame(), box);
    this.grid = /** @type {HTMLElement} */ (box.querySelector(".grid"));
    this.above = /** @type {HTMLElement} */ (box.querySelector(".above"));
    this.below = /** @type {HTMLElement} */ (box.querySelector(".below"));
    this.tools = /** @type {HTMLElement} */ (box.querySelector(".list-tools"));
    this.head = /** @type {HTMLElement} */ (box.querySelector(".grid-head"));
    this.rows = /** @type {HTMLElement} */ (box.querySelector(".rows"));
    this.scrollTop = 0;
    new ResizeObserver(([entry]) => {
      this.viewPx = entry.contentRect.height;
      this.wide = entry.contentRect.width >= TABLE_PX;
      page.frames.draw("list");
    }).observe(this.grid);
    // It is read here, where it costs no layout.
    this.grid.addEventListener(
      "scroll",
      () => {
        this.scrollTop = this.grid.scrollTop;
        page.frames.draw("list");
      },
      { passive: true },
    );
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
  }

  get filter() {
    return /** @type {HTMLInputElement} */ (this.box.querySelector("#filter"));
  }

  get rowPx() {
    return this.wide ? ROW_PX : CARD_PX;
  }

  frame() {
    return html`
      <div class="list-tools"></div>
      <div class="grid" id="requests" role="grid" tabindex="0" aria-labelledby="list-title">
        <div class="grid-head" role="rowgroup"></div>
        <div class="above" aria-hidden="true"></div>
        <div class="rows" role="rowgroup"></div>
        <div class="below" aria-hidden="true"></div>
      </div>`;
  }

  /** Make the order again; a held order stays until it is asked for. */
  order(force = false) {
    const { page } = this;
    const { store, place } = page;
    const basis = JSON.stringify([place.q, place.sort, place.pins]);
    const { keys, errors } = ordered(store, place);
    this.errors = errors;
    const old = new Set(this.keys);
    const added = keys.reduce((sum, key) => sum + (old.has(key) ? 0 : 1), 0);
    if (force || !place.hold || basis !== this.made || !this.keys.length) {
      [this.keys, this.made, this.behind] = [keys, basis, 0];
    } else {
      this.keys = this.keys.filter((key) => store.requests.has(key));
      this.behind = added;
    }
  }

  draw() {
    const { page } = this;
    const { store, place } = page;
    this.order();
    const chosen = this.keys.indexOf(page.key);
    render(this.toolsOf(), this.tools);
    const { filter } = this;
    if (filter.value !== place.q && filter !== document.activeElement) filter.value = place.q;
    render(this.headOf(), this.head);
    const top = this.scrollTop;
    const headPx = this.wide ? ROW_PX : 0;
    const first = Math.max(0, Math.floor((top - headPx) / this.rowPx) - SPARE_ROWS);
    const end = Math.min(this.keys.length, Math.ceil((top + (this.viewPx || 600)) / this.rowPx) + SPARE_ROWS);
    const shown = this.keys.slice(first, end);
    this.above.style.height = `${first * this.rowPx}px`;
    this.below.style.height = `${(this.keys.length - end) * this.rowPx}px`;
    this.grid.classList.toggle("wide", this.wide);
    this.grid.setAttribute("aria-rowcount", String(this.keys.length + 1));
    this.grid.setAttribute("aria-colcount", String(this.wide ? this.columns().length : 1));
    if (chosen >= first && chosen < end) this.grid.setAttribute("aria-activedescendant", `row-${page.key}`);
    else this.grid.removeAttribute("aria-activedescendant");
    const pinned = new Set(place.pins);
    render(
      shown.length || !this.keys.length
        ? html`${repeat(
            shown,
            (key) => key,
            (key, i) => {
              const request = store.requests.get(key);
              return request ? this.row(request, first + i, pinned) : nothing;
            },
          )}${this.keys.length ? nothing : this.none()}`
        : nothing,
      this.rows,
    );
    const seen = this.keys.slice(Math.max(0, Math.floor(top / this.rowPx)), end).slice(0, WINDOW_MAX);
    if (seen.join() !== this.window.join()) {
      this.window = seen;
      page.onSubscription();
    }
  }

  none() {
    const { store } = this.page;
    const text = store.requests.size ? "No request matches the filter." : "No request yet.";
    return html`<div role="row" class="none"><span role="gridcell">${text}</span></div>`;
  }

  toolsOf() {
    const { page } = this;
    const { place, store } = page;
    const all = store.requests.size;
    const names = store.probeNames;
    return html`
      <div class="list-title">
        <h2 id="list-title">Requests</h2>
        <span class="soft" id="list-count">${
          this.keys.length === all ? count(all) : [count(this.keys.length), "of", count(all)].join(" ")
        }</span>
        <span class="gap"></span>
        <button type="button" id="follow" class="toggle" aria-pressed=${place.hold ? "false" : "true"}
          title="Show the newest request as soon as the shown one is over" @click=${() =>
            page.hold(!place.hold)}>Follow</button>
        <button type="button" class="toggle expand" aria-pressed=${place.view === "requests" ? "true" : "false"}
          title="Show the list as a table" @click=${() =>
            page.view(place.view === "requests" ? "request" : "requests")}>
          Table</button>
      </div>
      <div class="list-filter">
        <input id="filter" type="search" autocomplete="off" spellcheck="false" aria-label="Filter requests"
          aria-describedby=${this.errors.length ? "filter-error" : nothing}
          placeholder="Filter: words, probe:${names[0] ?? "code"}>2" .defaultValue=${place.q}
          @input=${(/** @type {InputEvent} */ event) => this.onFilter(event)}>
        ${
          names.length > 1
            ? html`<label class="field"><span class="unseen">Probe of the list</span><select id="list-probe"
          .value=${page.probe} @change=${(/** @type {any} */ event) => {
            page.go({ probe: event.target.value });
            page.onSubscription();
            page.frames.draw("list");
          }}>${names.map(
            (name) => html`<option value=${name} ?selected=${name === page.probe}>${visible(name)}</option>`,
          )}</select></label>`
            : nothing
        }
        ${
          this.wide
            ? nothing
            : html`<label class="field"><span class="unseen">Sort</span><select id="sort"
          @change=${(/** @type {any} */ event) => this.sort(event.target.value)}>
          ${this.sorts().map(
            ([value, name]) => html`<option value=${value} ?selected=${value === place.sort}>${name}</option>`,
          )}
        </select></label>`
        }
      </div>
      ${this.errors.length ? html`<p id="filter-error" class="filter-error">${this.errors[0]}</p>` : nothing}
      ${
        this.behind
          ? html`<button type="button" class="more" @click=${() => {
              this.order(true);
              page.frames.draw("list");
            }}>${plural(this.behind, "new request")}: show</button>`
          : nothing
      }`;
  }

  /** @returns {[string, string][]} */
  sorts() {
    const { probe, place } = this.page;
    /** @type {[string, string][]} */
    const sorts = [
      ["-started", "newest"],
      ["started", "oldest"],
      ["-tokens", "longest"],
      ["-steered", "most steered"],
      ["-lost", "most lost rows"],
    ];
    if (probe)
      sorts.push([`-max:${probe}`, `highest ${visible(probe)}`], [`-mean:${probe}`, `highest mean ${visible(probe)}`]);
    if (!sorts.some(([value]) => value === place.sort)) sorts.push([place.sort, visible(place.sort)]);
    return sorts;
  }

  /** @param {InputEvent} event */
  onFilter(event) {
    this.page.go({ q: /** @type {HTMLInputElement} */ (event.target).value });
    this.scroll(0);
    this.page.frames.draw("list");
  }

  /** @param {string} sort */
  sort(sort) {
    this.page.go({ sort });
    this.scroll(0);
    this.page.frames.draw("list");
  }

  /**
   * The columns of the table: name, class, sort, and the cell of a request.
   * @returns {{name: string, kind: string, sort: string, cell: (request: RequestSummary, pinned: Set<string>) =>
   * unknown}[]}
   */
  columns() {
    const { page } = this;
    const { store } = page;
    const several = store.engines.length > 1;
    const columns = [
      { name: "State", kind: "state", sort: "status", cell: stateCell },
      { name: "Prompt", kind: "words", sort: "text", cell: words },
      {
        name: "Id",
        kind: "id",
        sort: "",
        cell: (/** @type {RequestSummary} */ request) => html`<bdi>${visible(request.id)}</bdi>`,
      },
    ];
    if (several) {
      columns.push({
        name: "Engine",
        kind: "engine-name",
        sort: "engine",
        cell: (request) => html`<bdi>${visible(request.engine)}</bdi>`,
      });
    }
    columns.push({ name: "Tokens", kind: "number", sort: "tokens", cell: (request) => html`${count(request.tokens)}` });
    for (const name of store.probeNames) {
      const numbers = (/** @type {RequestSummary} */ request) => store.number(request, name);
      columns.push({
        name: `${visible(name)} max`,
        kind: "number probe",
        sort: `max:${name}`,
        cell: (request) => {
          const [most, , , fired] = numbers(request) ?? [null, null, null, null];
          return html`<span class=${fired ? "fired" : ""}>${number(most)}</span>`;
        },
      });
      columns.push({
        name: "mean",
        kind: "number",
        sort: `mean:${name}`,
        cell: (request) => html`${number(numbers(request)?.[1])}`,
      });
      if (name === page.probe) {
        columns.push({ name: "curve", kind: "curve", sort: "", cell: (request) => this.spark(request) });
      }
      columns.push({
        name: "fired",
        kind: "number",
        sort: `fired:${name}`,
        cell: (request) => html`${firedText(numbers(request)?.[3])}`,
      });
    }
    columns.push(
      {
        name: "Steered",
        kind: "steered-cell",
        sort: "steered",
        cell: (request) => html`${heldBadge(page, request)}${steeredBadge(request)}`,
      },
      {
        name: "Lost rows",
        kind: "number",
        sort: "lost",
        cell: (request) => html`${request.rows_lost ? html`<span class="bad">${count(request.rows_lost)}</span>` : ""}`,
      },
      { name: "Started", kind: "number when", sort: "started", cell: (request) => html`${clock(request.started_s)}` },
      { name: "Took", kind: "number", sort: "", cell: (request) => html`${took(request)}` },
    );
    return columns;
  }

  headOf() {
    const { place } = this.page;
    if (!this.wide) return html`<div role="row" class="unseen"><span role="columnheader">Request</span></div>`;
    const name = place.sort.replace(/^-/, "");
    const down = place.sort.startsWith("-");
    return html`<div role="row" class="row head"><span role="columnheader" class="cell pin-cell"><span
      class="unseen">Pin</span></span>
      ${this.columns().map((column) => {
        const sorted = column.sort === name;
        return html`<span role="columnheader" class="cell ${column.kind}"
          aria-sort=${sorted ? (down ? "descending" : "ascending") : nothing}>${
            column.sort
              ? html`<button type="button" @click=${() => this.sort(sorted && down ? column.sort : `-${column.sort}`)}>
                ${column.name}${sorted ? (down ? " ↓" : " ↑") : ""}</button>`
              : column.name
          }</span>`;
      })}</div>`;
  }

  /**
   * @param {RequestSummary} request
   * @param {number} index
   * @param {Set<string>} pinned
   */
  row(request, index, pinned) {
    const { page } = this;
    const chosen = request.key === page.key;
    const isPinned = pinned.has(nameOf(request.engine, request.id));
    const pin = html`<button type="button" class="pin" tabindex="-1" aria-pressed=${isPinned ? "true" : "false"}
      aria-label="Pin" title="Pin (p)" @click=${(/** @type {Event} */ event) => {
        event.stopPropagation();
        page.pin(request.key);
      }}>${isPinned ? "★" : "☆"}</button>`;
    return html`<div role="row" id="row-${request.key}" class="row" aria-rowindex=${index + 2} data-key=${request.key}
      data-status=${request.status} aria-selected=${chosen ? "true" : "false"} @click=${() => page.open(request.key)}>
      ${
        this.wide
          ? html`<span role="gridcell" class="cell pin-cell">${pin}</span>
            ${this.columns().map(
              (column) => html`<span role="gridcell"
              class="cell ${column.kind}">${column.cell(request, pinned)}</span>`,
            )}`
          : html`<span role="gridcell" class="card">${this.card(request)}${pin}</span>`
      }
    </div>`;
  }

  /** @param {RequestSummary} request */
  card(request) {
    const { page } = this;
    const { mark, word } = statusOf(request);
    const numbers = page.probe ? page.store.number(request, page.probe) : null;
    return html`
      <span class="mark" title=${word}><span aria-hidden="true">${mark}</span><span class="unseen">${word}</span></span>
      <span class="card-line"><span class="words">${words(request)}</span>${heldBadge(page, request)}${steeredBadge(
        request,
      )}${
        request.rows_lost
          ? html`<span class="badge bad" title="lost rows">−${short(request.rows_lost)}<span class="unseen"> rows
            lost</span></span>`
          : nothing
      }</span>
      <span class="card-line soft"><bdi class="id" title=${visible(request.id)}>${visible(request.id)}</bdi>
        <span class="nowrap">${count(request.tokens)}<span class="unseen"> tokens</span></span>
        <span class="gap"></span>${
          numbers
            ? html`${this.spark(request)}<span class="score ${numbers[3] ? "fired" : ""}"
        title="${page.probe}: max ${number(numbers[0])}, mean ${number(numbers[1])}">${number(numbers[0])}</span>`
            : nothing
        }</span>`;
  }

  /** @param {RequestSummary} request */
  spark(request) {
    const { page } = this;
    const values = page.store.sparks.get(request.key);
    if (!values?.length) return html`<svg class="spark" width="56" height="16" aria-hidden="true"></svg>`;
    const numbers = values.filter((value) => value !== null);
    const threshold = page.store.engine(request.engine)?.probes.find((one) => one.name === page.probe)?.threshold ?? 0;
    const [low, high] = [Math.min(threshold, ...numbers), Math.max(threshold, ...numbers)];
    return spark(values, 56, 16, { low, high, line: threshold });
  }

  /**
   * Open the request that is so many rows further.
   * @param {number} step
   */
  move(step) {
    const { page } = this;
    if (!this.keys.length) return;
    const at = this.keys.indexOf(page.key);
    const to = Math.max(0, Math.min(this.keys.length - 1, at + step));
    page.open(this.keys[to], true, page.place.view === "requests" ? "requests" : "request", false);
    this.reveal(to);
  }

  /** @param {number} top */
  scroll(top) {
    this.grid.scrollTop = top;
    this.scrollTop = this.grid.scrollTop;
  }

  /** @param {number} index */
  reveal(index) {
    const headPx = this.wide ? ROW_PX : 0;
    const top = index * this.rowPx + headPx;
    if (top - headPx < this.scrollTop) this.scroll(top - headPx);
    else if (top + this.rowPx > this.scrollTop + this.viewPx) this.scroll(top + this.rowPx - this.viewPx);
    this.page.frames.draw("list");
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.target !== this.grid || event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.viewPx / this.rowPx) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[
      event.key
    ];
    if (step !== undefined) this.move(step);
    else if (event.key === "Enter" && this.page.key) {
      this.page.view("request");
      document.getElementById("text")?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** @param {RequestSummary} request */
function stateCell(request) {
  const { mark, word } = statusOf(request);
  return html`<span class="mark" aria-hidden="true">${mark}</span> ${word.split(",")[0]}`;
}

/** @param {RequestSummary} request */
function words(request) {
  const text = request.text.replace(/\s+/g, " ").trim();
  return text ? html`<bdi>${text}</bdi>` : html`<bdi class="soft">${visible(request.id)}</bdi>`;
}

/**
 * @param {Page} page
 * @param {RequestSummary} request
 */
function heldBadge(page, request) {
  const holds = page.held(request);
  if (!holds.length) return nothing;
  const texts = holds.map((hold) => holdText(hold, page.desk?.name ?? ""));
  return html`<span class="badge held" title="steering: ${texts.join("; ")}">held</span>`;
}

/** @param {RequestSummary} request */
export function steeredBadge(request) {
  if (!request.steered) return nothing;
  return html`<span class="badge steered" title=${`${plural(request.steered, "steered position")}`}>steered</span>`;
}

/** @param {number | boolean | null | undefined} fired */
function firedText(fired) {
  if (fired === true) return "yes";
  return fired ? count(Number(fired)) : "";
}

/** @param {RequestSummary} request */
function took(request) {
  const { started_s: began, ended_s: end } = request;
  return end === null || began === null ? "" : duration(Math.max(0, end - began));
}
