// @ts-check
// Controls: joins what steers: the desk, the arming, the held buttons, and the two parts that show them.

import { Arming } from "./arming.js";
import { controlBar, killSwitch } from "./killswitch.js";
import { render } from "./lit.js";
import { Pace } from "./pace.js";
import { Press } from "./press.js";
import { bounds, within } from "./ratio.js";
import { steerPanel } from "./steerpanel.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./desk.js").Desk} Desk */
/** @typedef {import("./arming.js").Choice} Choice */

/** Input elements that take text. */
const TEXT = "textarea, input:not([type=range], [type=radio], [type=checkbox], [type=button])";

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
    /** Whether all requests are steered, not the shown one. */
    this.all = false;
    const stale = () => page.frames.draw("controls", "steer");
    this.arming = new Arming(stale);
    this.press = new Press(() => {
      stale();
      if (this.press.phase === "again") page.say("Press again");
    });
    /** Moves of the slider of what is applied. @type {Pace<Choice>} */
    this.moves = new Pace((choice) => desk.steer(choice, this.nameOf(choice.request), true));
    /** The element to focus once the panel is drawn. */
    this.focus = "";
    /** What had the focus before the panel was opened. @type {Element | null} */
    this.before = null;
    document.addEventListener("keydown", (event) => this.onKey(event), true);
    document.addEventListener("visibilitychange", () => this.press.rest());
  }

  // What is shown.

  /** The request that is steered: 0 for all, -1 if there is none. */
  get target() {
    if (this.all) return 0;
    return this.page.request ? this.page.key : -1;
  }

  /** How many requests run. */
  get running() {
    return this.page.store.counts?.open ?? 0;
  }

  /** Whether there is something to steer. */
  get live() {
    return this.all || this.page.request?.status === "live";
  }

  get bounds() {
    return bounds(this.arming.choice.way, this.desk.offer?.ratio_max ?? 0);
  }

  /** The site of the chosen vector. */
  get site() {
    return this.desk.offer?.vectors.find((vector) => vector.name === this.arming.choice.name)?.site ?? "";
  }

  /** @param {number} key */
  nameOf(key) {
    return key ? (this.page.store.requests.get(key)?.id ?? `request ${key}`) : "all requests";
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
    this.follow();
    const fallback = this.arming.stage === "applied" ? "steer-ratio" : "steer-arm";
    keepFocus(panel, () => render(steerPanel(this), panel), fallback);
    if (this.focus) document.getElementById(this.focus)?.focus();
    this.focus = "";
  }

  /** Show the kill switch inside a dialog, which covers the other one. */
  dialogPart() {
    return this.desk.may ? killSwitch(this, "dialog-") : "";
  }

  // What changes.

  /** Follow what the page shows and what the server says. */
  follow() {
    const { arming, desk, target } = this;
    const { offer } = desk;
    if (!offer) {
      arming.disarm();
      this.moves.drop();
      return;
    }
    if (arming.choice.request !== target) {
      this.leave();
      arming.choice.request = target;
    }
    const names = arming.choice.way === "gain" ? offer.modules : offer.vectors.map((vector) => vector.name);
    if (!names.includes(arming.choice.name)) {
      const way = offer.vectors.length ? "add" : "gain";
      this.leave();
      Object.assign(arming.choice, { way, name: offer.vectors[0]?.name ?? offer.modules[0] ?? "" });
      arming.choice.percent = this.bounds.still;
    }
    if (desk.frozen || !this.live) this.leave();
    if (arming.stage === "applied" && !desk.asked && !this.applied) {
      this.moves.drop();
      arming.ended();
    }
  }

  /** What is applied, as the server lists it. */
  get applied() {
    const { request, way, name } = this.arming.choice;
    const kind = way === "gain" ? "gain" : "steer";
    return this.desk.own.find((hold) => hold.request === request && hold.kind === kind && hold.name === name);
  }

  /** Disarm, and let go of the panel's buttons. */
  leave() {
    this.moves.drop();
    if (this.press.name.startsWith("steer-")) this.press.rest();
    this.arming.disarm();
  }

  toggle(open = !this.open) {
    if (!this.desk.may || open === this.open) return;
    this.open = open;
    if (open) {
      this.before = document.activeElement;
      this.focus = "steer-title";
    } else {
      this.leave();
      const { before } = this;
      const back = before instanceof HTMLElement && before !== document.body && before.isConnected ? before : null;
      (back ?? document.getElementById("steer-open"))?.focus();
    }
    this.page.frames.draw("controls", "steer", "list", "plots");
  }

  /** @param {boolean} all */
  aim(all) {
    this.all = all;
    this.follow();
    this.page.frames.draw("steer");
  }

  /** @param {Partial<Choice>} changes */
  choose(changes) {
    const { arming } = this;
    const way = changes.way ?? arming.choice.way;
    if (way !== arming.choice.way) changes.percent = bounds(way, 0).still;
    else if (changes.percent !== undefined) changes.percent = within(changes.percent, this.bounds);
    if (arming.choose(changes)) this.moves.offer(arming.choice);
    else if (arming.stage !== "applied") this.moves.drop();
  }

  arm() {
    const { arming, page } = this;
    if (arming.armed) this.leave();
    else if (this.live && !this.desk.frozen) {
      // The shown request stays, for another one would disarm.
      if (!this.all && !page.place.hold) page.hold(true);
      arming.arm();
    }
  }

  preview() {
    this.arming.preview(this.running);
    if (this.arming.stage === "preview") this.focus = "steer-preview";
  }

  back() {
    this.arming.back();
    this.focus = "steer-show";
  }

  apply() {
    const choice = this.arming.apply();
    if (choice) this.desk.steer(choice, this.nameOf(choice.request));
  }

  takeBack() {
    this.moves.drop();
    this.desk.unsteer(this.target, this.nameOf(this.target));
    this.arming.touch();
  }

  /** @param {number} key */
  abort(key) {
    this.desk.abort(key, this.nameOf(key));
  }

  kill() {
    this.leave();
    this.desk.kill();
  }

  /**
   * The kill switch, wherever the focus is but in a text.
   * @param {KeyboardEvent} event
   */
  onKey(event) {
    if (!this.desk.may) return;
    const { target } = event;
    if (event.key === "Escape") this.press.rest();
    if (!event.shiftKey || event.altKey || event.ctrlKey || event.metaKey || !isK(event)) return;
    if (target instanceof Element && target.matches(TEXT)) return;
    event.preventDefault();
    event.stopPropagation();
    if (!event.repeat) this.kill();
  }
}

/** @param {KeyboardEvent} event */
function isK({ key, code }) {
  // Layouts without Latin letters have the key at its place.
  return key.toLowerCase() === "k" || (code === "KeyK" && !/^[a-z]$/i.test(key));
}

/**
 * Draw a part; if what had the focus in it is gone, focus something else in it.
 * @param {HTMLElement} box
 * @param {() => void} draw
 * @param {string} fallback
 */
export function keepFocus(box, draw, fallback) {
  const had = box.contains(document.activeElement);
  draw();
  if (had && !box.contains(document.activeElement)) document.getElementById(fallback)?.focus();
}
