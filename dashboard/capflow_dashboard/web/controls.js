// @ts-check
// Controls: what is there as soon as the page may steer: the desk, the kill switch, and the way to the panel.
//
// Invariant: the kill switch needs nothing that is loaded later; the panel is.

import { Desk } from "./desk.js";
import { keepFocus } from "./focus.js";
import { controlBar, killSwitch } from "./killswitch.js";
import { Later, style } from "./later.js";
import { html, render } from "./lit.js";
import { claimName, nextNumber } from "./naming.js";
import { Press } from "./press.js";

/** @typedef {import("./page.js").Page} Page */

/**
 * Return the controls of a page, which has a name then.
 * @param {Page} page
 * @param {import("./feed.js").Feed} feed
 * @param {{bar: HTMLElement, panel: HTMLElement}} boxes
 */
export async function openControls(page, feed, boxes) {
  const name = await claimName(sessionStorage, (bytes) => crypto.getRandomValues(bytes), navigator.locks);
  const desk = new Desk(name, {
    send: (message) => feed.send(message),
    now: () => performance.now(),
    number: () => nextNumber(sessionStorage, Date.now()),
    every: (call, ms) => setInterval(call, ms),
    stop: (timer) => clearInterval(timer),
    changed: () => page.frames.draw("controls", "steer", "list", "head"),
    say: (text) => page.say(text),
  });
  return new Controls(page, desk, boxes);
}

export class Controls {
  /**
   * @param {Page} page
   * @param {Desk} desk
   * @param {{bar: HTMLElement, panel: HTMLElement}} boxes
   */
  constructor(page, desk, boxes) {
    this.page = page;
    this.desk = desk;
    this.boxes = boxes;
    this.open = false;
    const stale = () => page.frames.draw("controls", "steer");
    this.press = new Press(() => {
      stale();
      if (this.press.phase === "again") page.say("Press again");
    });
    /** What had the focus before the panel was opened. @type {Element | null} */
    this.before = null;
    /** What the panel shows. @type {Later<import("./steering.js").Steering>} */
    this.steering = new Later("Steering", () => this.load(), stale);
    document.addEventListener("visibilitychange", () => this.press.rest());
    const leave = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") this.press.rest();
    };
    document.addEventListener("keydown", leave, true);
  }

  async load() {
    const [{ Steering }] = await Promise.all([import("./steering.js"), style("steer.css")]);
    return new Steering(this);
  }

  drawBar() {
    const { bar } = this.boxes;
    bar.hidden = !this.desk.may;
    if (this.desk.may) keepFocus(bar, () => render(controlBar(this), bar), "kill");
  }

  drawPanel() {
    const { panel } = this.boxes;
    const open = this.open && this.desk.may;
    document.body.dataset.steer = open ? "open" : "";
    panel.hidden = !open;
    if (!open) return;
    const steering = this.steering.get();
    if (steering) steering.draw(panel);
    else render(html`${panelHead(this)}${this.steering.stead()}`, panel);
  }

  /**
   * Show the kill switch inside a dialog, which covers the other one.
   * @param {string} [place] the beginning of its ids
   */
  dialogPart(place = "dialog-") {
    return this.desk.may ? killSwitch(this, place) : "";
  }

  toggle(open = !this.open) {
    if (!this.desk.may || open === this.open) return;
    this.open = open;
    const steering = this.steering.value;
    if (open) {
      this.before = document.activeElement;
      if (steering) steering.focus = "steer-title";
    } else {
      steering?.leave();
      const { before } = this;
      const back = before instanceof HTMLElement && before !== document.body && before.isConnected ? before : null;
      (back ?? document.getElementById("steer-open"))?.focus();
    }
    this.page.frames.draw("controls", "steer", "list", "plots");
  }

  kill() {
    this.steering.value?.leave();
    this.desk.kill();
  }
}

/** @param {Controls} controls */
export function panelHead(controls) {
  return html`<div class="steer-head"><h2 id="steer-title" tabindex="-1">Steer</h2><span class="gap"></span>
    <button type="button" class="icon" id="steer-close" aria-label="Close" title="Close (s)"
      @click=${() => controls.toggle(false)}>✕</button></div>`;
}
