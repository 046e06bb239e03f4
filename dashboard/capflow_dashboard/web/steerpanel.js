// @ts-check
// Steerpanel: the panel that steers one request or all: what, how much, the preview, and what came back.

import { stateText } from "./actions.js";
import { panelHead } from "./controls.js";
import { clock, count, plural, visible } from "./format.js";
import { holdsOf, holdText } from "./holds.js";
import { html, nothing, repeat } from "./lit.js";
import { holdButton } from "./pressed.js";
import { amount } from "./ratio.js";

/** @typedef {import("./steering.js").Steering} Steering */

/** @param {Steering} steering */
export function steerPanel(steering) {
  const { desk, page, all, target } = steering;
  const { request } = page;
  const segment = (/** @type {boolean} */ value, /** @type {string} */ name) => html`<button type="button"
    aria-pressed=${all === value ? "true" : "false"} @click=${() => steering.aim(value)}>${name}</button>`;
  return html`
    ${panelHead(steering.controls)}
    <div class="segments" role="group" aria-label="What is steered">${segment(false, "This request")}${segment(
      true,
      "All requests",
    )}</div>
    <p class="steer-target">${
      all
        ? html`${plural(steering.running, "running request")}, and those that come`
        : request
          ? html`<bdi>${visible(request.id)}</bdi>`
          : "No request is shown."
    }</p>
    ${held(steering)}
    ${
      desk.frozen
        ? html`<p class="steer-note">All steering is off. Release the kill switch to steer again.</p>`
        : !steering.live
          ? html`<p class="steer-note">${request ? "This request is over." : "Choose a request, or all."}</p>`
          : nothing
    }
    ${choice(steering)}
    ${act(steering)}
    ${
      all
        ? nothing
        : html`<div class="steer-line"><span class="soft">End it for its user:</span>${holdButton(steering.press, {
            id: "steer-abort",
            label: "Hold to abort",
            again: "Press again to abort",
            kind: "danger",
            disabled: !steering.live,
            run: () => steering.abort(target),
          })}</div>`
    }
    ${log(steering)}`;
}

/** @param {Steering} steering */
function held(steering) {
  const { all, desk, page, target } = steering;
  const holds = all ? desk.holds.filter((hold) => !hold.request) : holdsOf(desk.holds, page.key, steering.live);
  if (target < 0) return nothing;
  return html`<div class="steer-held"><ul id="steer-holds" aria-label="Held">${
    holds.length
      ? holds.map((hold) => html`<li class="steer-ink">${holdText(hold, desk.name)}</li>`)
      : html`<li class="soft">No page holds anything here.</li>`
  }</ul><button type="button" class="small" id="steer-back" aria-disabled=${steering.live ? nothing : "true"}
    title="Take back what steers ${all ? "all running requests" : "this request"}" @click=${() =>
      steering.live && steering.takeBack()}>Take back</button></div>`;
}

/**
 * The choice of a vector or a module, and of how much.
 * @param {{arming: {choice: import("./arming.js").Choice}, bounds: import("./ratio.js").Bounds, site: string,
 *   desk: import("./desk.js").Desk, choose: (changes: Partial<import("./arming.js").Choice>) => void}} controls
 * @param {string} [place] the beginning of ids, where it is shown a second time
 */
export function choice(controls, place = "steer") {
  const { arming, bounds, desk, site } = controls;
  const { vectors = [], modules = [] } = desk.offer ?? {};
  const { way, name, percent } = arming.choice;
  if (!vectors.length && !modules.length) {
    return html`<p class="steer-note">There is nothing to steer with. Start the dashboard with
      <code>--vector NAME=FILE</code> or <code>--module NAME</code>.</p>`;
  }
  const option = (/** @type {"vector" | "module"} */ kind, /** @type {string} */ one) => html`<option
    value="${kind}:${one}" ?selected=${one === name && (way === "gain") === (kind === "module")}>${visible(
      one,
    )}</option>`;
  const ways = /** @type {const} */ ([
    ["add", "Add"],
    ["remove", "Remove its direction"],
  ]);
  const words = amount(way, percent, site);
  return html`
    <div class="steer-line"><label class="field"><span>With</span><select id="${place}-name" @change=${(
      /** @type {any} */ event,
    ) => {
      const [kind, chosen] = split(event.target.value);
      controls.choose({ name: chosen, way: kind === "module" ? "gain" : way === "gain" ? "add" : way });
    }}>
      ${group(
        "Vectors",
        vectors.map((one) => option("vector", one.name)),
      )}${group(
        "Modules",
        modules.map((one) => option("module", one)),
      )}
    </select></label>${
      way === "gain"
        ? nothing
        : html`<span class="segments" role="group" aria-label="How">${ways.map(
            ([value, label]) => html`<button type="button" aria-pressed=${value === way ? "true" : "false"}
              @click=${() => controls.choose({ way: value })}>${label}</button>`,
          )}</span>`
    }</div>
    <div class="steer-ratio"><label for="${place}-ratio" class="unseen">How much</label>
      <span class="soft" aria-hidden="true">${bounds.low < 0 ? "−" : ""}${Math.abs(bounds.low)}</span>
      <input type="range" id="${place}-ratio" min=${bounds.low} max=${bounds.high} step="1" .value=${String(percent)}
        aria-valuetext=${words} @input=${(/** @type {any} */ event) =>
          controls.choose({ percent: Number(event.target.value) })}>
      <span class="soft" aria-hidden="true">${bounds.high} %</span></div>
    <p class="steer-amount" id="${place}-amount">${words}</p>`;
}

/**
 * @param {string} label
 * @param {unknown[]} options
 */
function group(label, options) {
  return options.length ? html`<optgroup label=${label}>${options}</optgroup>` : nothing;
}

/** @param {string} value */
function split(value) {
  const at = value.indexOf(":");
  return [value.slice(0, at), value.slice(at + 1)];
}

/** @param {Steering} steering */
function act(steering) {
  const { arming, bounds, desk } = steering;
  const { stage, choice } = arming;
  if (!choice.name) return nothing;
  const may = steering.live && !desk.frozen;
  const still = choice.percent === bounds.still;
  return html`
    <div class="steer-line"><button type="button" class="toggle" id="steer-arm" aria-disabled=${may ? nothing : "true"}
      aria-pressed=${arming.armed ? "true" : "false"} aria-describedby="steer-arm-hint" @click=${() =>
        steering.arm()}>${arming.armed ? "Armed" : "Arm"}</button>
      <span class="soft" id="steer-arm-hint">${
        arming.armed ? "until 60 s without use, or another request" : "Nothing is sent before that."
      }</span></div>
    ${
      stage === "armed"
        ? html`<div class="steer-line"><button type="button" class="primary" id="steer-show"
          aria-disabled=${still ? "true" : nothing} @click=${() => still || steering.preview()}>Preview</button>${
            still ? html`<span class="soft">Move the slider first: this changes nothing.</span>` : nothing
          }</div>`
        : stage === "preview"
          ? preview(steering)
          : stage === "applied"
            ? html`<p class="steer-note applied" id="steer-applied">Applied. Moving the slider changes it at once.</p>`
            : nothing
    }`;
}

/** @param {Steering} steering */
function preview(steering) {
  const { all, arming, desk, page, press, site } = steering;
  const { way, name, percent } = arming.choice;
  const { offer } = desk;
  const does = { add: "Add", remove: "Remove the direction of", gain: "Scale the module" }[way];
  return html`<section class="steer-preview" id="steer-preview" tabindex="-1" aria-labelledby="steer-preview-title">
    <h3 id="steer-preview-title">Preview: nothing is sent yet</h3>
    <dl class="pairs">
      <dt>requests</dt><dd>${
        all
          ? html`all ${count(arming.running)} that run, and those that come`
          : html`<bdi>${visible(page.request?.id ?? "")}</bdi>`
      }</dd>
      <dt>what</dt><dd>${does} <bdi><b>${visible(name)}</b></bdi></dd>
      ${way === "gain" ? nothing : html`<dt>where</dt><dd>${site}</dd>`}
      <dt>how much</dt><dd>${amount(way, percent, site)}</dd>
      <dt>lease</dt><dd>${offer?.lease_s} s or ${count(offer?.lease_positions ?? 0)} positions, renewed while this page
        is open</dd>
    </dl>
    <p class="steer-warning">Answers to users will change.</p>
    ${
      all
        ? html`<label class="field" id="steer-confirm"><span>Type ${arming.running} to confirm</span><input
          id="steer-count" type="text" inputmode="numeric" autocomplete="off" size="6" .value=${arming.typed}
          @input=${(/** @type {any} */ event) => arming.type(event.target.value)}></label>`
        : nothing
    }
    <div class="steer-line">${holdButton(press, {
      id: "steer-apply",
      label: "Hold to apply",
      again: "Press again to apply",
      title: "Hold for 0.6 s, or press twice, slowly",
      kind: "primary",
      disabled: !arming.ready,
      run: () => steering.apply(),
    })}<button type="button" class="small" id="steer-cancel" @click=${() => steering.back()}>Cancel</button></div>
  </section>`;
}

/** @param {Steering} steering */
function log(steering) {
  const { entries } = steering.desk.actions;
  if (!entries.length) return nothing;
  return html`<h3>Actions of this page</h3><ol class="steer-log" id="steer-log" role="list">${repeat(
    entries,
    (entry) => entry.id,
    (entry) => html`<li data-state=${entry.state}><span class="soft">${clock(entry.atS)}</span>
      <span><bdi>${visible(entry.what)}</bdi> <span class=${
        entry.state === "applied" ? "good" : entry.state === "pending" || entry.state === "waiting" ? "soft" : "bad"
      }>${visible(stateText(entry))}</span></span></li>`,
  )}</ol>`;
}
