// @ts-check
// Alarm: the line of alerts that fire. It loads what draws it when the dashboard has rules.

import { style } from "./later.js";

export class Alarm {
  /**
   * @param {HTMLElement} box
   * @param {import("./page.js").Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    /** @type {import("./alertbar.js").AlertBar | null} */
    this.bar = null;
    this.loading = false;
  }

  draw() {
    if (this.bar) this.bar.draw();
    else if (this.page.store.hello?.alerts?.length && !this.loading) this.load();
  }

  async load() {
    this.loading = true;
    try {
      const [{ AlertBar }] = await Promise.all([import("./alertbar.js"), style("alerts.css")]);
      this.bar = new AlertBar(this.box, this.page);
      this.page.frames.draw("alarm");
    } catch {
      // The server is gone, which the page says. It is loaded again with the next heartbeat.
      this.loading = false;
    }
  }
}
