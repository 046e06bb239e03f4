// @ts-check
// Request: the head of the shown request and the choice of what colours it.

import { clock, count, duration, number, plural, visible } from "./format.js";
import { holdText } from "./holds.js";
import { steeredBadge } from "./list.js";
import { html, nothing } from "./lit.js";
import { seriesLabel, seriesName, statusOf } from "./page.js";
import { nameOf } from "./place.js";
import { legend } from "./plots.js";
import { TITLES } from "./scale.js";

/** @typedef {import("./page.js").Page} Page */

/** @param {Page} page */
export function requestHead(page) {
  const { request, place } = page;
  if (!request) return nothing;
  const { mark, word } = statusOf(request);
  const generated = Math.max(0, request.tokens - request.prompt_length);
  const { started_s: began, ended_s: ended } = request;
  const end = ended ?? (request.status === "live" ? page.store.heartbeat?.t : began) ?? began;
  const took = began === null || end === null ? null : Math.max(0, end - began);
  const pinned = place.pins.includes(nameOf(request.engine, request.id));
  const several = page.store.engines.length > 1;
  return html`
    <div class="title">
      <button type="button" class="small back" @click=${() => page.view("requests")}>← Requests</button>
      <h2 id="request-id" title=${visible(request.id)}><bdi>${visible(request.id)}</bdi></h2>
      <span class="chip" id="request-status" data-status=${request.status}>${mark} ${word}</span>
      ${steeredBadge(request)}
      ${page
        .held(request)
        .map((hold) => html`<span class="badge held">steering: ${holdText(hold, page.desk?.name ?? "")}</span>`)}
      <button type="button" class="pin" aria-pressed=${pinned ? "true" : "false"} aria-label="Pin" title="Pin (p)"
        @click=${() => page.pin(request.key)}>${pinned ? "★" : "☆"}</button>
      <span class="gap"></span>
      ${
        page.mayRun
          ? html`<button type="button" class="small" id="again-open" title="Run its prompt again, plain and steered (r)"
            @click=${() => page.runAgain()}>Run again, steered</button>`
          : nothing
      }
      <button type="button" class="small" id="compare-open" title="Compare with another request (c)"
        @click=${() => page.compare(request.key)}>Compare</button>
    </div>
    <p class="soft request-facts" id="request-facts">${
      several ? html`<bdi>${visible(request.engine)}</bdi> · ` : nothing
    }${plural(request.prompt_length, "prompt token")}, ${count(generated)} generated${
      request.rows_lost ? html` · <b class="bad">${plural(request.rows_lost, "row")} lost</b>` : nothing
    } · started ${clock(began)}, ${request.status === "live" ? "running" : "took"} ${duration(took)}${pooledScores(
      page,
    )}</p>`;
}

/** @param {Page} page */
function pooledScores(page) {
  const { request, store } = page;
  const probes = request ? (store.engine(request.engine)?.probes ?? []) : [];
  return probes.map((probe, i) => {
    const numbers = request?.probes[i];
    if (probe.pool === "token" || !numbers) return nothing;
    const score = { max: numbers[0], mean: numbers[1], last: numbers[2] }[probe.pool] ?? numbers[1];
    return html` · <span class="nowrap">${visible(probe.name)} ${number(score)} <span>(${probe.pool})</span>${
      numbers[3] ? html` <b class="fired">fires</b>` : nothing
    }</span>`;
  });
}

/** @param {Page} page */
export function requestTools(page) {
  const { detail, measured, place } = page;
  if (!detail || measured < 0) return nothing;
  const one = detail.series[measured];
  const option = (/** @type {number} */ row) =>
    html`<option value=${seriesName(detail.series[row])} ?selected=${row === measured}>${visible(
      seriesLabel(detail.series[row]),
    )}</option>`;
  const scales = /** @type {const} */ ([
    ["z", "deviation (z)"],
    ["ratio", "ratio to median"],
    ["log", "log₁₀"],
    ["raw", "as it is"],
  ]);
  const baseline = detail.baseline !== null;
  const ref = baseline ? place.ref : "request";
  return html`
    <label class="field"><span>Colour by</span><select id="by" @change=${(/** @type {any} */ event) =>
      page.colourBy(detail.series.findIndex((other) => seriesName(other) === event.target.value))}>
      ${detail.probes.length ? html`<optgroup label="Score of probe">${detail.probes.map(option)}</optgroup>` : nothing}
      ${detail.norms.length ? html`<optgroup label="Norm at">${detail.norms.map(option)}</optgroup>` : nothing}
    </select></label>
    <label class="field"><span>Norms as</span><select id="scale" @change=${(/** @type {any} */ event) =>
      page.recolour({ scale: event.target.value })}>${scales.map(
      ([value, name]) => html`<option value=${value} ?selected=${value === place.scale}>${name}</option>`,
    )}</select></label>
    ${
      baseline
        ? html`<label class="field"><span>Reference</span><select id="ref" @change=${(/** @type {any} */ event) =>
            page.recolour({ ref: event.target.value })}>
      <option value="request" ?selected=${ref === "request"}>this request's ${
        detail.references.of === "prompt" ? "prompt" : "first rows"
      }</option>
      <option value="baseline" ?selected=${ref === "baseline"}>baseline</option></select></label>`
        : nothing
    }
    <span class="gap"></span>
    <span class="legends" id="legend">${referenceText(page, measured)}${legend(page.scale(measured))}${
      one.probe
        ? html`<span class="soft nowrap">${
            one.pool === "token"
              ? html`<u>fires</u> from ${number(page.threshold(measured))}`
              : `centred at ${number(one.threshold)}`
          }</span>`
        : nothing
    }</span>`;
}

/**
 * Return what the colours are measured against, or what is still waited for.
 * @param {Page} page
 * @param {number} row
 */
function referenceText(page, row) {
  const { detail, place } = page;
  if (!detail) return nothing;
  const reference = page.references()[row];
  if (reference && !reference.rows) return html`<span class="soft nowrap" id="reference">reference: no numbers</span>`;
  if (place.ref === "baseline" && detail.baseline) {
    return html`<span class="soft nowrap" id="reference">${TITLES[page.scale(row).kind]}, reference: baseline of
      ${plural(detail.baselineTokens, "token")}</span>`;
  }
  const { waits, of } = detail.references;
  if (!reference && waits) {
    return html`<span class="soft nowrap" id="reference">no colours yet; reference: ${count(waits.have)} of
      ${plural(waits.want, "row")}</span>`;
  }
  const rows = reference?.rows ?? 0;
  return html`<span class="soft nowrap" id="reference">${TITLES[page.scale(row).kind]}, reference: ${
    of === "prompt" ? plural(rows, "prompt row") : `first ${plural(rows, "row")}`
  }</span>`;
}
