// @ts-check
// Export: a sheet with the link of the view, its pictures, and the files of the list and of the request.

import { listCsv } from "./csv.js";
import { count, plural, visible } from "./format.js";
import { html, nothing, render } from "./lit.js";
import { curvePicture, fileName, heatPicture, save, savePicture, textPicture } from "./picture.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {{name: string, picture: () => HTMLCanvasElement | null}} Shot */

export class ExportSheet {
  /**
   * @param {Page} page
   * @param {import("./list.js").List} list
   * @param {import("./plots.js").Plots} plots
   */
  constructor(page, list, plots) {
    this.page = page;
    this.list = list;
    this.plots = plots;
    this.box = document.createElement("dialog");
    this.box.id = "export";
    this.box.className = "help export";
    this.box.setAttribute("aria-labelledby", "export-title");
    this.box.addEventListener("click", (event) => {
      if (event.target === this.box) this.box.close();
    });
    document.body.append(this.box);
    /** The name of the button that has done its work. */
    this.done = "";
  }

  /** @param {Shot[]} shots the pictures of a view that has its own */
  open(shots) {
    this.done = "";
    this.shots = shots;
    this.draw();
    if (!this.box.open) this.box.showModal();
  }

  /** @param {string} name */
  finish(name) {
    this.done = name;
    this.draw();
  }

  draw() {
    const { page, list } = this;
    const { request, store } = page;
    page.settle();
    const formats = store.hello?.exports ?? ["csv"];
    const all = store.requests.size;
    const ofView = page.place.view === "request" && request && page.detail;
    const button = (/** @type {string} */ name, /** @type {string} */ text, /** @type {() => unknown} */ act) =>
      html`<button type="button" class="small" data-name=${name} @click=${async () => {
        if ((await act()) !== false) this.finish(name);
      }}>${this.done === name ? `${text} ✓` : text}</button>`;
    /** @type {Shot[]} */
    const shots = ofView
      ? [
          { name: "Text", picture: () => textPicture(page) },
          ...(page.detail?.probes.length ? [{ name: "Curves", picture: () => curvePicture(page, this.plots) }] : []),
          { name: "Heatmap", picture: () => heatPicture(page, this.plots) },
        ]
      : (this.shots ?? []);
    render(
      html`<div class="help-head"><h2 id="export-title">Export</h2><button type="button" class="icon"
        aria-label="Close" @click=${() => this.box.close()}>✕</button></div>
        <div class="export-body">
          <section><h3>This view</h3>
            <div class="export-line"><input id="export-link" type="text" readonly aria-label="Link to this view"
              .value=${location.href} @focus=${(/** @type {any} */ event) => event.target.select()}>
              ${button("link", "Copy link", () => this.copy())}</div>
            <p class="soft">The link opens the same view for everyone who has a session. It holds no token.</p>
            ${
              shots.length
                ? html`<div class="export-line"><span>Picture, PNG</span>${shots.map(({ name, picture }) =>
                    button(name, name, async () => {
                      const canvas = picture();
                      // The page may follow the newest request behind this sheet.
                      const of = page.place.view === "request" ? `${fileName(page.request?.id ?? "")}-` : "";
                      if (!canvas) return false;
                      await savePicture(canvas, `capflow-${of}${name.toLowerCase()}`);
                    }),
                  )}</div>`
                : nothing
            }
          </section>
          <section><h3>List</h3>
            <div class="export-line"><span>${
              list.keys.length === all
                ? plural(all, "request")
                : `${count(list.keys.length)} of ${plural(all, "request")}, as filtered`
            }</span>${button("list", "CSV", () => {
              const text = listCsv(store, list.keys);
              save(new Blob([text], { type: "text/csv;charset=utf-8" }), "capflow-requests.csv");
            })}</div></section>
          ${
            request
              ? html`<section><h3>Request <bdi>${visible(request.id)}</bdi></h3>
            <div class="export-line"><span>All kept tokens, with every norm and score</span>${formats.map(
              (format) => html`<a class="small" href="/api/requests/${request.key}.${format}" download
                data-name=${format}>${{ csv: "CSV", parquet: "Parquet" }[format] ?? format}</a>`,
            )}</div></section>`
              : nothing
          }
        </div>`,
      this.box,
    );
  }

  /** Copy the link; a browser that does not allow it shows it chosen, to be copied by hand. */
  async copy() {
    const input = /** @type {HTMLInputElement} */ (this.box.querySelector("#export-link"));
    try {
      await navigator.clipboard.writeText(input.value);
    } catch {
      input.focus();
      input.select();
    }
  }
}
