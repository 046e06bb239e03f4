// @ts-check
// Lensview: the lens in the token's panel.

import { tokenText } from "./format.js";
import { changes, percentText } from "./lens.js";
import { html, nothing, svg } from "./lit.js";

/** @typedef {import("./protocol.js").LensLayer} LensLayer */

const BAR_PX = 34;

/**
 * The section of the token's panel.
 * @param {import("./page.js").Page} page
 * @param {import("./detail.js").Detail} detail
 * @param {number} column
 */
export function lensSection(page, detail, column) {
  const { lens } = page;
  if (!lens || page.store.hello?.lens !== true) return nothing;
  const title = page.store.hello.lens_title ?? "Logit lens";
  const position = detail.base + column;
  const shown = lens.shown?.request === page.key && lens.shown.position === position ? lens.shown : null;
  const { cursor } = page;
  const waits = shown !== null && !shown.answer;
  const may = cursor !== null && !waits;
  return html`<div class="lens-head"><h3 id="lens-title">${title}</h3><span class="gap"></span>
    <button type="button" class="small" id="lens-ask" aria-keyshortcuts="l" aria-disabled=${may ? nothing : "true"}
      title="${title} of the kept token (l)" @click=${() =>
        may && lens.ask(page.key, detail.base + cursor)}>${title}</button></div>
  <div id="lens" aria-labelledby="lens-title" aria-busy=${waits ? "true" : "false"}>${
    !shown
      ? html`<p class="soft">What each layer would predict after ${
          cursor === column ? "this token" : "a token: click it to keep it"
        }.</p>`
      : !shown.answer
        ? html`<p class="soft" id="lens-waits">Computing…</p>`
        : shown.answer.error
          ? html`<p class="bad" id="lens-error">${shown.answer.error}</p>`
          : table(shown.answer.layers, title)
  }</div>`;
}

/**
 * @param {LensLayer[]} layers
 * @param {string} title
 */
function table(layers, title) {
  if (!layers.length) return html`<p class="soft">No row of this token is kept.</p>`;
  const ranks = Math.max(1, ...layers.map((layer) => layer.tokens.length));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="${title} by layer"><table class="lens-table"
    id="lens-layers"><thead><tr><th scope="col">site</th>${Array.from(
      { length: ranks },
      (_, rank) => html`<th scope="col">${rank ? `${rank + 1}.` : "most likely"}</th>`,
    )}</tr></thead>
    <tbody>${changes(layers).map(
      ({ layer, changed }) =>
        html`<tr class=${changed ? "changed" : ""}><th scope="row">${layer.site}${
          changed ? html`<span class="unseen"> changes</span>` : nothing
        }</th>${
          layer.tokens.length
            ? layer.tokens.map((token) => html`<td>${cell(token)}</td>`)
            : html`<td colspan=${ranks} class="soft">the row holds NaN or infinity</td>`
        }</tr>`,
    )}</tbody></table></div>`;
}

/** @param {[number, string | null, number]} token */
function cell([id, text, probability]) {
  const width = Math.max(0, Math.min(1, probability)) * BAR_PX;
  return html`<bdi class="token-text" title="token ${id}, probability ${probability.toPrecision(3)}">${tokenText(
    text,
    id,
  )}</bdi><span class="lens-share"><svg width=${BAR_PX} height="4" aria-hidden="true">${svg`<rect class="track"
    width=${BAR_PX} height="4" /><rect class="part" width=${width.toFixed(1)} height="4" />`}</svg> <span
    class="soft">${percentText(probability)}</span></span>`;
}
