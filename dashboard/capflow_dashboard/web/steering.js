// @ts-check
// Steering: joins what steers one request or all: the choice, the arming, the moves of the slider, and the panel.

import { Arming } from "./arming.js";
import { keepFocus } from "./focus.js";
import { render } from "./lit.js";
import { Pace } from "./pace.js";
import { bounds, within } from "./ratio.js";
import { steerPanel } from "./steerpanel.js";

/** @typedef {import("./arming.js").Choice} Choice */

export class Steering {
  /** @param {import("./controls.js").Controls} controls */
  constructor(controls) {
    this.controls = controls;
    this.page = controls.page;
    this.desk = controls.desk;
    this.press = controls.press;
    /** Whether all requests are steered, not the shown one. */
    this.all = false;
    this.arming = new Arming(() => this.page.frames.draw("controls", "steer"));
    /** Moves of the slider of what is applied. @type {Pace<Choice>} */
    this.moves = new Pace((choice) => this.desk.steer(choice, this.nameOf(choice.request), true));
    /** The element to focus once the panel is drawn. */
    this.focus = "steer-title";
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

  /** @param {HTMLElement} panel */
  draw(panel) {
    this.follow();
    const fallback = this.arming.stage === "applied" ? "steer-ratio" : "steer-arm";
    keepFocus(panel, () => render(steerPanel(this), panel), fallback);
    if (this.focus) document.getElementById(this.focus)?.focus();
    this.focus = "";
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
}
