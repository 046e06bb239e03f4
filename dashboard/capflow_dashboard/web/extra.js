// @ts-check
// Extra: loads what is not needed at first, when it is first shown: its modules and its style sheet.

/** @type {Promise<void> | null} */
let styled = null;

/** Load the style sheet of these views, once. */
function style() {
  styled ??= new Promise((done) => {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = "extra.css";
    // Without the sheet it can still be read.
    link.onload = link.onerror = () => done();
    document.head.append(link);
  });
  return styled;
}

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
};

/** The views that are loaded when they are first shown. */
export class Extras {
  /**
   * @param {HTMLElement} main
   * @param {import("./page.js").Page} page
   */
  constructor(main, page) {
    this.main = main;
    this.page = page;
    /** Of each view that was shown, its element, and itself once it is loaded.
     * @type {Map<string, {box: HTMLElement, view: View | null}>} */
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
    for (const [name, { box }] of this.views) box.hidden = name !== shown;
    if (!this.shows(shown)) return;
    const entry = this.views.get(shown);
    if (entry) entry.view?.draw();
    else this.load(shown);
  }

  /** @param {string} name */
  async load(name) {
    const box = document.createElement("section");
    box.id = name;
    box.className = name;
    /** @type {{box: HTMLElement, view: View | null}} */
    const entry = { box, view: null };
    this.views.set(name, entry);
    this.main.append(box);
    try {
      const [Kind] = await Promise.all([VIEWS[name].load(), style()]);
      entry.view = new Kind(box, this.page);
      this.page.frames.draw("extra");
    } catch {
      // The server is gone, which the page says. It is loaded again when the view is drawn again.
      box.remove();
      this.views.delete(name);
    }
  }

  get view() {
    return this.views.get(this.page.place.view)?.view ?? null;
  }

  next() {
    this.view?.next?.();
  }

  pictures() {
    return this.view?.pictures?.() ?? [];
  }
}

/** @type {Promise<import("./export.js").ExportSheet> | null} */
let sheet = null;

/**
 * Open the sheet of exports.
 * @param {import("./page.js").Page} page
 * @param {import("./list.js").List} list
 * @param {import("./plots.js").Plots} plots
 * @param {import("./export.js").Shot[]} shots the pictures of a view of this module
 */
export async function openExport(page, list, plots, shots) {
  sheet ??= Promise.all([import("./export.js"), style()]).then(
    ([{ ExportSheet }]) => new ExportSheet(page, list, plots),
  );
  try {
    (await sheet).open(shots);
  } catch {
    // The server is gone, which the page says.
    sheet = null;
  }
}
