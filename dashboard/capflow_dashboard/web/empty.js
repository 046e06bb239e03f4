// @ts-check
// Empty: what the page shows while there is no request to show, and what to do then.

import { modelName, visible } from "./format.js";
import { html, nothing } from "./lit.js";

/** @typedef {import("./page.js").Page} Page */

/** @param {Page} page */
export function emptyState(page) {
  const { engines, heartbeat, requests } = page.store;
  const here = engines.filter((engine) => !engine.gone);
  const { place, link } = page;
  if (link === "refused") {
    return html`<h2>Not admitted</h2><p>${page.why}</p><p class="soft">The link looks like this; it holds a
      token:</p><pre>http://127.0.0.1:8765/#token=…</pre>`;
  }
  if (link === "connecting" || (!heartbeat && link === "open"))
    return html`<p class="loading" role="status">Loading…</p>`;
  if (requests.size && place.id && place.hold) {
    return html`<h2>This request is not kept</h2><p>The dashboard has no request
      <bdi><b>${visible(place.id)}</b></bdi>${
        place.engine
          ? html` of engine
      <bdi><b>${visible(place.engine)}</b></bdi>`
          : nothing
      }. It keeps the newest ones.</p>
      <p><button type="button" class="primary" @click=${() => page.hold(false)}>Follow the newest request</button></p>`;
  }
  const model = here[0]?.model ?? "MODEL";
  const step = (
    /** @type {boolean} */ done,
    /** @type {string} */ title,
    /** @type {unknown} */ body,
  ) => html`<li class=${done ? "done" : ""}>
    <h3>${title}${done ? html` <span class="good">✓ done</span>` : nothing}</h3>${done ? nothing : body}</li>`;
  return html`<h2>${here.length ? "Waiting for a request" : "No engine is connected yet"}</h2>
    <p>This page shows what a model computes while it serves: each token of each request, and the norms and probe
      scores of its rows.</p>
    <ol class="steps">
      ${step(
        here.length > 0,
        "Start an engine",
        html`<pre>capflow serve MODEL</pre><p class="soft">In another
        terminal. It connects to this hub by itself; name another hub with <code>--hub</code>.</p>`,
      )}
      ${step(
        false,
        "Send a request",
        html`<pre>curl http://127.0.0.1:8000/v1/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "${visible(here.length ? modelName(model) : "MODEL")}",
       "prompt": "The capital of France is"}'</pre>`,
      )}
      ${step(
        false,
        "Read it",
        html`<p class="soft">Tokens appear here as they are computed. Point at one to see every
        layer and every probe. Press <kbd>?</kbd> for keys and colours.</p>`,
      )}
    </ol>`;
}
