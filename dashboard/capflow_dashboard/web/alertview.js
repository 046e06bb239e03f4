// @ts-check
// Alertview: all rules of alerts with their state and value, their mutes, and the latest changes.

import { mutes } from "./alertbar.js";
import { clock, duration, number, visible } from "./format.js";
import { html, nothing, render, repeat } from "./lit.js";
import { nowhere, write } from "./place.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./alertbar.js").AlertRule} AlertRule */
/** @typedef {import("./alertbar.js").AlertState} AlertState */
/** @typedef {import("./alertbar.js").AlertChange} AlertChange */

const STATES = { firing: ["▲", "firing"], pending: ["◔", "pending"], inactive: ["·", "inactive"] };
const MUTES = /** @type {[string, number][]} */ ([
  ["10 minutes", 600_000],
  ["1 hour", 3_600_000],
  ["until unmuted", 0],
]);
const RANK = { firing: 0, pending: 1, inactive: 2 };

export class AlertView {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    box.setAttribute("aria-labelledby", "alerts-title");
  }

  draw() {
    const { store } = this.page;
    const { states, changes } = store.alerts;
    const rules = store.hello?.alerts ?? [];
    render(
      html`<div class="alerts-head"><h2 id="alerts-title">Alerts</h2>
        <p class="soft">${
          rules.length
            ? "A mute is for this browser only. The log and the metrics always have what fires."
            : "There are no rules. The option alerts of the dashboard has them."
        }</p></div>
        <ul class="rules">${repeat(
          rules,
          (rule) => rule.name,
          (rule) =>
            this.rule(
              rule,
              states.filter((one) => one.rule === rule.name),
            ),
        )}</ul>
        ${
          rules.length
            ? html`<h3 id="changes-title">Latest changes</h3>${
                changes.length
                  ? html`<ol class="changes" aria-labelledby="changes-title">${changes
                      .map((one) => this.change(one, rules))
                      .reverse()}</ol>`
                  : html`<p class="soft">None since the dashboard began.</p>`
              }`
            : nothing
        }`,
      this.box,
    );
  }

  /**
   * @param {AlertRule} rule
   * @param {AlertState[]} states
   */
  rule(rule, states) {
    const sorted = states.toSorted((a, b) => RANK[a.state] - RANK[b.state]);
    return html`<li class="rule" data-state=${sorted[0]?.state ?? "inactive"}>
      <div class="rule-head"><h3>${rule.name}</h3>${this.mute(rule)}<code>${visible(rule.text)}</code></div>
      ${
        sorted.length
          ? html`<ul class="states">${sorted.map((one) => this.state(rule, one))}</ul>`
          : html`<p class="soft">No engine to watch${rule.probe ? " has this probe" : ""}.</p>`
      }</li>`;
  }

  /**
   * @param {AlertRule} rule
   * @param {AlertState} one
   */
  state(rule, one) {
    const [mark, word] = STATES[one.state];
    const since = one.state === "inactive" ? "" : ` since ${clock(one.since_s)}`;
    return html`<li data-state=${one.state}>
      <span class="state"><span aria-hidden="true">${mark}</span> ${word}${since}</span>
      <span class="value">${written(one.value, rule.unit)}</span>
      <span class="soft">fires ${rule.bound}${unitOf(rule.unit)}, over ${rule.clear}${unitOf(rule.unit)}</span>
      ${this.places(rule, one)}</li>`;
  }

  /**
   * Show where it is, with a way there.
   * @param {AlertRule} rule
   * @param {{engine: string, request: string}} one
   */
  places(rule, { engine, request }) {
    const { page } = this;
    const place = { ...nowhere(), view: /** @type {const} */ ("request"), engine, id: request, hold: true };
    return html`${engine ? html`<bdi class="place">${visible(engine)}</bdi>` : nothing}${
      request ? html`<a class="place" href=${write(place)}><bdi>${visible(request)}</bdi></a>` : nothing
    }${
      rule.probe && engine
        ? html`<button type="button" class="small" aria-label="Population of ${rule.probe} on ${visible(engine)}"
          @click=${() => {
            page.go({ engine, probe: rule.probe });
            page.view("population");
          }}>Population</button>`
        : nothing
    }`;
  }

  /** @param {AlertRule} rule */
  mute(rule) {
    const until = mutes.until(rule);
    const change = (/** @type {number | null} */ ms) => {
      mutes.mute(rule, ms);
      this.page.announce(ms === null ? `${rule.name} is heard` : `${rule.name} is muted`);
      this.page.frames.draw("extra", "alarm");
      requestAnimationFrame(() => document.getElementById(`mute-${rule.name}`)?.focus());
    };
    if (until !== null)
      return html`<button type="button" class="small" id="mute-${rule.name}"
        @click=${() => change(null)}>Muted${until ? ` until ${clock(until / 1000)}` : ""} · Unmute<span
        class="unseen"> ${rule.name}</span></button>`;
    return html`<select id="mute-${rule.name}" aria-label="Mute ${rule.name}" @change=${(/** @type {Event} */ event) =>
      change(Number(/** @type {HTMLSelectElement} */ (event.target).value))}><option selected disabled
      value="">Mute</option>${MUTES.map(([name, ms]) => html`<option value=${ms}>${name}</option>`)}</select>`;
  }

  /**
   * @param {AlertChange} one
   * @param {AlertRule[]} rules
   */
  change(one, rules) {
    const rule = rules.find(({ name }) => name === one.rule);
    const fires = one.state === "firing";
    return html`<li data-state=${one.state}><time>${clock(one.at_s)}</time>
      <span class="state"><span aria-hidden="true">${fires ? "▲" : "✓"}</span> ${one.rule} ${
        fires ? "fires" : `is over after ${duration(one.fired_s)}`
      }</span>
      <span class="value">${written(one.value, rule?.unit ?? "")}</span>
      ${rule ? this.places({ ...rule, probe: "" }, one) : nothing}</li>`;
  }
}

/**
 * @param {number | null} value
 * @param {string} unit
 */
function written(value, unit) {
  return value === null ? "no value" : `${number(value)}${unitOf(unit)}`;
}

/** @param {string} unit */
function unitOf(unit) {
  return unit && ` ${unit}`;
}
