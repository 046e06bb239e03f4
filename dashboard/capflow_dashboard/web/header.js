// @ts-check
// Header: the engines, the counts, the rates, and whether what is shown is now.

import { count, duration, modelName, plural, short, size, visible } from "./format.js";
import { html, nothing, svg } from "./lit.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./protocol.js").Engine} Engine */

const STATES = {
  connecting: "connecting",
  live: "live",
  stored: "stored",
  stale: "stale",
  silent: "silent",
  lost: "reconnecting",
  ended: "ended",
  refused: "refused",
};
/** A lag above this many seconds is marked. */
const LAG_S = 2;

/** @param {Page} page */
export function header(page) {
  const { store, place, state } = page;
  const { counts, heartbeat } = store;
  const dropped = Object.values(counts?.dropped ?? {}).reduce((sum, rows) => sum + rows, 0);
  const reasons = Object.entries(counts?.dropped ?? {}).map(([reason, rows]) => `${reason}: ${count(rows)}`);
  const name = store.hello?.source?.name;
  const stored = state === "stored";
  const lag = stored ? null : (heartbeat?.lag_s ?? null);
  const own = /** @type {const} */ (["population", "alerts", "health"]);
  const current = own.find((view) => view === place.view) ?? "requests";
  const tab = (/** @type {"requests" | "population" | "alerts" | "health"} */ view, /** @type {unknown} */ name) =>
    html`<button type="button" class="tab" aria-current=${view === current ? "page" : nothing}
    @click=${() => page.view(view === "requests" && current !== "requests" ? "request" : view)}>${name}</button>`;
  return html`
    <div class="brand"><img src="icon.svg" alt="" width="22" height="22"><h1>capflow</h1></div>
    <nav class="tabs" aria-label="Views">${tab("requests", "Requests")}${tab("population", "Population")}${
      store.hello?.alerts?.length
        ? tab(
            "alerts",
            html`Alerts${
              page.alarms
                ? html` <b class="alarm-count">${page.alarms}<span class="unseen"> firing</span></b>`
                : nothing
            }`,
          )
        : nothing
    }${tab("health", "Health")}</nav>
    <div class="engines">${engines(store)}</div>
    <dl class="facts">
      <div><dt>live</dt><dd>${count(counts?.open ?? 0)}</dd></div>
      <div><dt>done</dt><dd>${count(counts?.done ?? 0)}</dd></div>
      ${
        dropped
          ? html`<div class="bad" title=${reasons.join(", ")}><dt>rows
        dropped</dt><dd>${short(dropped)}</dd></div>`
          : nothing
      }
      ${rate("tokens/s", store.rates.tokens, short)}
      ${rate("bytes/s", store.rates.bytes, size, "roomy")}
      <div class=${lag !== null && lag > LAG_S ? "lag bad" : "lag"}
        title="Age of the newest rows when they arrived here">
        <dt>lag</dt><dd id="lag">${duration(lag)}</dd></div>
    </dl>
    <div id="link" class="link" data-state=${state} title=${name ? visible(name) : nothing}>${STATES[state]}</div>
    <button type="button" class="icon" aria-label="Export" title="Export (e)" id="export-open">↧</button>
    <button type="button" class="icon" aria-label="Help and keys" title="Help and keys (?)" id="help-open">?</button>`;
}

/** @param {import("./store.js").Store} store */
function engines({ engines }) {
  const here = engines.filter((engine) => !engine.gone);
  const gone = engines.length - here.length;
  if (!engines.length) return html`<span class="soft">no engine</span>`;
  /** @type {Map<string, Engine[]>} */ const models = new Map();
  for (const engine of here) models.set(engine.model, [...(models.get(engine.model) ?? []), engine]);
  return html`${[...models].map(([model, all]) => {
    const facts = `${all[0].num_layers} × ${all[0].hidden_size}, ${all[0].dtype}`;
    const names = all.map((engine) => visible(engine.name)).join(", ");
    return html`<span class="engine" title="${model}\n${facts}\n${names}"><b>${visible(modelName(model))}</b>
      <span class="soft">${facts} · ${names}</span></span>`;
  })}${gone ? html`<span class="soft">${here.length ? `${gone} left` : "every engine has left"}</span>` : nothing}`;
}

/**
 * @param {string} name
 * @param {number[]} values
 * @param {(value: number) => string} show
 * @param {string} [kind]
 */
function rate(name, values, show, kind = "") {
  // A second without a step between two with one is the engine's rhythm: show the mean of the last three.
  const last = values.slice(-3);
  const mean = last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : 0;
  return html`<div class="rate ${kind}"><dt>${name}</dt><dd>${show(Math.round(mean))}</dd>${spark(
    values.slice(-60),
    60,
    18,
  )}</div>`;
}

/**
 * Return a small curve from 0 to its highest value.
 * @param {(number | null)[]} values
 * @param {number} width
 * @param {number} height
 * @param {{low?: number, high?: number, line?: number | null}} [range]
 */
export function spark(values, width, height, { low, high, line = null } = {}) {
  const numbers = values.filter((value) => value !== null);
  const bottom = low ?? 0;
  const top = Math.max(high ?? 1, ...numbers);
  const y = (/** @type {number} */ value) =>
    (height - 1 - ((value - bottom) / (top - bottom || 1)) * (height - 2)).toFixed(1);
  const step = width / Math.max(1, values.length - 1);
  let path = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${(i * step).toFixed(1)} ${y(value)}`;
      pen = "L";
    }
  });
  return html`<svg class="spark" width=${width} height=${height} viewBox="0 0 ${width} ${height}" aria-hidden="true">
    ${line === null ? nothing : svg`<line class="limit" x1="0" x2=${width} y1=${y(line)} y2=${y(line)} />`}
    <path d=${path || "M0 0"} /></svg>`;
}

/**
 * Return what is to be said about the state of the connection; empty if all is well.
 * @param {Page} page
 */
export function noticeOf(page) {
  const { heartbeat, counts, engines, hello } = page.store;
  const lines = [];
  if (page.why) lines.push(page.why);
  else if (page.state === "stale") {
    lines.push(`The hub has said nothing for ${duration(heartbeat?.silent_s)}. What is shown is old.`);
  } else if (page.state === "ended") {
    lines.push("The hub has ended. What is shown is its last state.");
  }
  for (const name of page.missing) lines.push(`${name} could not be loaded: capflow does not answer. Try it again.`);
  if (counts?.not_kept) {
    const most = hello ? ` (requests_max is ${count(hello.requests_max)})` : "";
    lines.push(`${plural(counts.not_kept, "running request")} not shown: no room${most}.`);
  }
  for (const engine of engines) {
    if (!engine.gone) for (const problem of engine.problems) lines.push(`⚠ ${visible(engine.name)}: ${problem}`);
  }
  return lines;
}
