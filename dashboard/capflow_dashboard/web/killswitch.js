// @ts-check
// Killswitch: the controls that are always in sight: the way to the panel, the kill switch, and what is held.

import { heldCount } from "./holds.js";
import { html, nothing } from "./lit.js";
import { holdButton } from "./pressed.js";

/** @typedef {import("./controls.js").Controls} Controls */

/**
 * @param {Controls} controls
 * @param {string} [place] a prefix for ids, where they are shown a second time
 */
export function killSwitch(controls, place = "") {
  const { desk, press } = controls;
  const { frozen, killing } = desk;
  const state = frozen ? "off" : killing ? "ending" : "on";
  return html`<div class="kill" data-state=${state}>
    <button type="button" class="kill-button" id="${place}kill" aria-pressed=${frozen ? "true" : "false"}
      aria-keyshortcuts="Shift+K" title="Take all steering back, everywhere, at once (Shift+K)"
      @click=${() => controls.kill()}><span class="kill-sign" aria-hidden="true"></span>Stop all steering</button>
    <span class="kill-state" id="${place}kill-state">${
      frozen
        ? html`<b>All steering is off</b>`
        : killing
          ? html`<b>Turning all steering off…</b>`
          : heldCount(desk.holds, desk.name)
    }</span>
    ${
      frozen
        ? holdButton(press, {
            id: `${place}release`,
            label: "Hold to release",
            again: "Press again to release",
            title: "Let requests be steered again. Nothing is steered by that alone.",
            kind: "small",
            run: () => desk.release(),
          })
        : nothing
    }</div>`;
}

/** @param {Controls} controls */
export function controlBar(controls) {
  return html`<button type="button" class="toggle" id="steer-open" aria-expanded=${controls.open ? "true" : "false"}
    aria-controls="steer" aria-keyshortcuts="s" title="Steer a request, or all (s)"
    @click=${() => controls.toggle()}>Steer</button>${killSwitch(controls)}`;
}
