// @ts-check
// Token: everything about one token: what it is, what steered it, every probe, every layer. Each part is a section of
// its own; `SECTIONS` names them in order.

import { acting, actingText } from "./acting.js";
import { clock, number, show, tokenText, visible } from "./format.js";
import { Lens } from "./lens.js";
import { lensSection } from "./lensview.js";
import { html, nothing, svg } from "./lit.js";
import { z } from "./scale.js";
import { Stored, storedSection } from "./stored.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./detail.js").Detail} Detail */
/** @typedef {(page: Page, detail: Detail, column: number) => unknown} Section */

const CURVE = { width: 280, height: 84 };
const Z_SHOWN = 6;
const EVENTS_SHOWN = 200;

/** @type {Section[]} */
const SECTIONS = [facts, probes, lensSection, layers, storedSection];

/**
 * Return what draws the panel of a page; from then on the page can ask for what is not sent by itself.
 * @param {Page} page
 * @param {(message: object) => boolean} send
 */
export function openPanel(page, send) {
  const draw = () => page.frames.draw("token");
  page.lens = new Lens(send, draw);
  page.stored = new Stored(send, draw);
  return tokenPanel;
}

/** @param {Page} page */
function tokenPanel(page) {
  const { detail, column } = page;
  if (!detail) return nothing;
  return html`${
    column === null
      ? html`<h2>Token</h2><p class="soft">Point at a token, a curve or a cell. A click,
        or <kbd>←</kbd> <kbd>→</kbd>, keeps it here.</p>`
      : SECTIONS.map((section) => section(page, detail, column))
  }${steering(page, detail)}`;
}

/** @type {Section} */
function facts(page, detail, column) {
  const position = detail.base + column;
  const isPrompt = position < (page.request?.prompt_length ?? 0);
  const id = detail.ids[column];
  const by = detail.steered[column] ? acting(detail.events, position).map(actingText) : null;
  return html`<h2 id="token-title">Token <bdi class="token-text">${tokenText(detail.texts[column], id)}</bdi></h2>
    <dl class="pairs" id="token-facts">
      <dt>position</dt><dd>${position.toLocaleString("en")}, ${isPrompt ? "prompt" : "generated"}</dd>
      <dt>token id</dt><dd>${id < 0 ? "unknown" : id}</dd>
      <dt>text</dt><dd><code>${JSON.stringify(detail.texts[column] ?? "").slice(0, 200)}</code></dd>
      <dt>steered</dt><dd id="token-steered">${
        by === null ? "no" : html`<b class="steer-ink">yes</b>${by.length ? html`, ${by.join("; ")}` : nothing}`
      }</dd>
    </dl>`;
}

/** @type {Section} */
function probes(page, detail, column) {
  const rows = detail.probes;
  if (!rows.length) return nothing;
  return html`<h3>Probes</h3><table class="numbers" id="token-probes"><thead><tr><th scope="col">probe</th><th
    scope="col">score</th><th scope="col">from</th><th scope="col">fires</th></tr></thead>
    <tbody>${rows.map((row) => {
      const one = detail.series[row];
      const value = detail.values[row][column];
      const fired = page.fires(row, column);
      const word =
        one.pool === "token"
          ? fired
            ? html`<b class="fired">yes</b>`
            : "no"
          : html`<span class="soft">by ${one.pool}</span>`;
      return html`<tr><th scope="row"><bdi>${visible(one.probe)}</bdi> <span
        class="soft">${one.site}</span></th><td>${show(value)}</td>
        <td>${number(page.threshold(row))}</td><td>${word}</td></tr>`;
    })}</tbody></table>`;
}

/** @type {Section} */
function layers(page, detail, column) {
  const rows = detail.norms;
  if (!rows.length) return nothing;
  const references = page.references();
  return html`<h3>Norm by layer</h3>${curve(page, detail, column, rows)}
    <table class="numbers" id="token-layers"><thead><tr><th scope="col">site</th><th scope="col">norm</th><th
      scope="col">z</th><td class="bar-cell"></td></tr></thead>
    <tbody>${[...rows].reverse().map((row) => {
      const value = detail.values[row][column];
      const reference = references[row];
      const far = reference?.rows && Number.isFinite(value) ? z(value, reference) : NaN;
      const at = Number.isFinite(far) ? Math.max(-1, Math.min(1, far / Z_SHOWN)) * 30 : 0;
      return html`<tr aria-current=${row === page.layer ? "true" : nothing} @click=${() => page.mark(row)}>
        <th scope="row">${detail.series[row].site}</th><td>${show(value)}</td><td>${
          Number.isNaN(far) ? "–" : Number.isFinite(far) ? far.toFixed(2).replace("-", "−") : number(far)
        }</td>
        <td class="bar-cell"><svg width="62" height="10" aria-hidden="true"><line x1="31" x2="31" y1="0" y2="10"
          class="axis" />
          <rect class=${at < 0 ? "low" : "high"} x=${31 + Math.min(0, at)} y="2" width=${Math.abs(at)} height="6"
            /></svg></td></tr>`;
    })}</tbody></table>`;
}

/**
 * @param {Page} page
 * @param {Detail} detail
 * @param {number} column
 * @param {number[]} rows
 */
function curve(page, detail, column, rows) {
  const { width, height } = CURVE;
  const logs = rows.map((row) => Math.log10(detail.values[row][column]));
  const middles = rows.map((row) => Math.log10(page.references()[row]?.median ?? NaN));
  const numbers = [...logs, ...middles].filter(Number.isFinite);
  if (!numbers.length) return nothing;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const x = (/** @type {number} */ i) => 4 + (i / Math.max(1, rows.length - 1)) * (width - 8);
  const y = (/** @type {number} */ value) => 6 + (1 - (value - low) / (high - low || 1)) * (height - 12);
  const path = (/** @type {number[]} */ values) => {
    let [text, pen] = ["", "M"];
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) pen = "M";
      else {
        text += `${pen}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      }
    });
    return text || "M0 0";
  };
  const marked = rows.indexOf(page.layer);
  return html`<figure class="layer-curve"><svg viewBox="0 0 ${width} ${height}" role="img"
    aria-label="Norm by layer, logarithmic, with the median of the reference">
      <path class="reference" d=${path(middles)} /><path class="value" d=${path(logs)} />
      ${Number.isFinite(logs[marked]) ? svg`<circle cx=${x(marked)} cy=${y(logs[marked])} r="3.5" />` : nothing}</svg>
    <figcaption><span><i class="key value"></i>this token</span><span><i
      class="key reference"></i>reference</span><span class="soft">log₁₀, first to last
      layer</span></figcaption></figure>`;
}

/**
 * The steering events of the request.
 * @param {Page} page
 * @param {Detail} detail
 */
function steering(page, detail) {
  const { events } = detail;
  if (!events.length) return nothing;
  return html`<h3>Steering of this request</h3><ol class="events" id="events">${events
    .slice(-EVENTS_SHOWN)
    .map((event) => {
      const facts = [
        event.scale === null ? "" : `× ${number(event.scale)}`,
        event.sites?.length ? `at ${event.sites.join(", ")}` : "",
        event.score === null
          ? ""
          : `score ${number(event.score)}${event.threshold === null ? "" : ` (from ${number(event.threshold)})`}`,
        event.reason ?? "",
      ].filter(Boolean);
      return html`<li><button type="button" class="link-button" ?disabled=${event.position === null}
        @click=${() => page.point(Number(event.position) - detail.base)}>${
          event.position === null ? "–" : event.position.toLocaleString("en")
        }</button>
      <span><b>${event.kind}</b>${event.label ? html` <bdi>${visible(event.label)}</bdi>` : nothing}${
        event.by
          ? html`
        <span class="soft">by <bdi>${visible(event.by)}</bdi></span>`
          : nothing
      }
        ${facts.length ? html`<span class="event-facts">${facts.join(" · ")}</span>` : nothing}</span>
      <span class=${event.outcome === "applied" ? "soft" : "bad"} title=${
        event.time_s === null ? nothing : clock(event.time_s)
      }>${event.outcome ?? ""}</span></li>`;
    })}</ol>`;
}
