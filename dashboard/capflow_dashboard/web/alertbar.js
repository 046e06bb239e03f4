// @ts-check
// Alertbar: the line below the header that says what fires and is not muted, and the count of it.

import { plural, visible } from "./format.js";
import { html, nothing, render } from "./lit.js";
import { Mutes } from "./mutes.js";

/**
 * @typedef {import("./page.js").Page} Page
 * @typedef {{name: string, text: string, probe: string, unit: string, bound: string, clear: string}} AlertRule
 * @typedef {{rule: string, engine: string, request: string, state: "firing" | "pending" | "inactive",
 *   since_s: number, value: number | null}} AlertState
 * @typedef {{rule: string, engine: string, request: string, state: "firing" | "resolved", value: number | null,
 *   at_s: number, fired_s: number}} AlertChange
 * @typedef {{states: AlertState[], changes: AlertChange[]}} Alerts
 */

const NAMED_MAX = 3;

/** The mutes of this page. A browser may refuse its storage. */
export const mutes = new Mutes(storage());

function storage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}

/**
 * Return the rules that fire and are not muted, each with its states that do.
 * @param {Page} page
 */
export function heard({ store }) {
  return (store.hello?.alerts ?? []).flatMap((rule) => {
    const states = store.alerts.states.filter((one) => one.rule === rule.name && one.state === "firing");
    return states.length && mutes.until(rule) === null ? [{ rule, states }] : [];
  });
}

export class AlertBar {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
  }

  draw() {
    const { box, page } = this;
    const fired = heard(page);
    box.className = fired.length ? "alarm" : "unseen";
    const names = fired.slice(0, NAMED_MAX).map(({ rule, states }) => {
      const engines = states.filter((one) => one.engine).map((one) => visible(one.engine));
      const places =
        engines.length > 1 ? ` on ${plural(engines.length, "engine")}` : engines[0] ? ` on ${engines[0]}` : "";
      return `${rule.name}${places}`;
    });
    if (fired.length > NAMED_MAX) names.push(`${fired.length - NAMED_MAX} more`);
    render(
      html`<p role="status">${
        fired.length
          ? html`<span aria-hidden="true">▲ </span><b>${plural(fired.length, "alert")} ${
              fired.length === 1 ? "fires" : "fire"
            }:</b> <bdi>${names.join(", ")}</bdi>`
          : nothing
      }</p>${
        fired.length && page.place.view !== "alerts"
          ? html`<button type="button" class="small" id="alarm-show" @click=${() => page.view("alerts")}>Show</button>`
          : nothing
      }`,
      box,
    );
    if (fired.length === page.alarms) return;
    page.alarms = fired.length;
    page.frames.draw("top", "shell");
  }
}
