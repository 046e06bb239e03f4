// @ts-check
// Extra: the views that are loaded when they are first shown.

import { Later, style } from "./later.js";
import { render } from "./lit.js";

/** @typedef {{draw: () => void, next?: () => void, pictures?: () => import("./export.js").Shot[]}} View */
/** @typedef {new (box: HTMLElement, page: import("./page.js").Page) => View} Kind */

/**
 * The views, and the news that concern each.
 * @type {Record<string, {load: () => Promise<Kind>, news: string[]}>}
 */
const VIEWS = {
  compare: {
    load: async () => (await import("./compare.js")).CompareView,
    news: ["requests", "detail", "colours", "fresh", "other", "hello"],
  },
  population: {
    load: async () => (await import("./population.js")).PopulationView,
    news: ["population", "engines", "hello"],
  },
  health: {
    load: async () => (await import("./health.js")).Health,
    news: ["health", "heartbeat", "rates", "hello"],
  },
  alerts: {
    load: async () => (await Promise.all([import("./alertview.js"), style("alerts.css")]))[0].AlertView,
    news: ["alerts", "hello"],
  },
};

/** The comparison has a panel as a token has. */
const SHEETS = ["token.css", "extra.css"];

export class Extras {
  /**
   * @param {HTMLElement} main
   * @param {import("./page.js").Page} page
   */
  constructor(main, page) {
    this.main = main;
    this.page = page;
    /** Of each view that was shown, where it is, where it is said that it is missing, and itself once it is loaded.
     * @type {Map<string, {box: HTMLElement, stead: HTMLElement, view: Later<View>}>} */
    this.views = new Map();
  }

  /** @param {string} view */
  shows(view) {
    return view in VIEWS;
  }

  /** @param {Set<string>} changed */
  concerns(changed) {
    return VIEWS[this.page.place.view].news.some((name) => changed.has(name));
  }

  /** Draw the view of the page, if it is one of these; hide the others. */
  draw() {
    const shown = this.page.place.view;
    if (this.shows(shown) && !this.views.has(shown)) this.add(shown);
    for (const [name, { box, stead, view }] of this.views) {
      box.hidden = name !== shown || !view.value;
      stead.hidden = name !== shown || view.value !== null;
      if (name !== shown) continue;
      const loaded = view.get();
      if (loaded) loaded.draw();
      else render(view.stead(), stead);
    }
  }

  /** @param {string} name */
  add(name) {
    const box = document.createElement("section");
    box.id = name;
    box.className = name;
    const stead = document.createElement("section");
    this.main.append(box, stead);
    const load = async () => {
      const [Kind] = await Promise.all([VIEWS[name].load(), ...SHEETS.map(style)]);
      return new Kind(box, this.page);
    };
    const title = `${name[0].toUpperCase()}${name.slice(1)}`;
    const view = new Later(title, load, () => this.page.frames.draw("extra"));
    this.views.set(name, { box, stead, view });
  }

  get view() {
    return this.views.get(this.page.place.view)?.view.value ?? null;
  }

  next() {
    this.view?.next?.();
  }

  pictures() {
    return this.view?.pictures?.() ?? [];
  }
}
