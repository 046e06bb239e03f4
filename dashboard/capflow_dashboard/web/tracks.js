// @ts-check
// Tracks: the score curve of each probe, with a threshold that can be moved. It shows what would fire; it changes
// nothing.

import { envelope, spans } from "./bins.js";
import { verdict } from "./curve.js";
import { number, visible } from "./format.js";
import { ink } from "./inks.js";
import { html, nothing, render } from "./lit.js";
import { seriesName } from "./page.js";
import { drawCurve } from "./strip.js";

/** @typedef {import("./page.js").Page} Page */

const PLOT_PX = 46;
const PAD_PX = 4;
const STEPS = 100;

/** One probe's curve. */
class Track {
  /**
   * @param {number} row
   * @param {number} place its place among the tracks, which chooses its colour
   * @param {Page} page
   * @param {{left: number, width: number, right: number}} frame
   */
  constructor(row, place, page, frame) {
    this.row = row;
    this.page = page;
    this.frame = frame;
    this.ink = `--probe-${place % 6}`;
    this.box = document.createElement("div");
    this.box.className = "track";
    this.box.dataset.place = String(place % 6);
    this.head = document.createElement("div");
    this.head.className = "track-head";
    this.plot = document.createElement("div");
    this.plot.className = "track-plot";
    this.line = document.createElement("div");
    this.line.className = "threshold";
    this.line.tabIndex = 0;
    this.line.setAttribute("role", "slider");
    this.line.setAttribute("aria-orientation", "vertical");
    this.line.setAttribute("aria-label", `Threshold of ${page.detail?.series[row].probe}`);
    this.line.addEventListener("pointerdown", (event) => this.drag(event));
    this.line.addEventListener("dblclick", () => page.moveThreshold(row, null));
    this.line.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.plot.append(this.canvas, this.line);
    this.box.append(this.head, this.plot);
    this.low = 0;
    this.high = 1;
    /** What fires at the threshold of the file, and what would fire at that which was moved. */
    this.fired = "";
    this.would = "";
  }

  draw() {
    const { page, row, frame } = this;
    const { detail, span } = page;
    if (!detail || frame.width <= 0) return;
    this.range();
    const end = Math.min(span.to, detail.count);
    drawCurve(this.canvas, {
      width: frame.left + frame.width + frame.right,
      height: PLOT_PX,
      left: frame.left,
      right: frame.right,
      pad: PAD_PX,
      from: span.from,
      to: span.to,
      low: this.low,
      high: this.high,
      ...envelope(detail.values[row], span.from, end, Math.floor(frame.width)),
      colour: this.ink,
      show: number,
      under(context, x) {
        context.fillStyle = ink("--steer-soft");
        for (const [first, past] of spans(detail.steered, span.from, end)) {
          const left = x(first - 0.5);
          context.fillRect(left, 0, x(past - 0.5) - left, PLOT_PX);
        }
      },
    });
    const threshold = page.threshold(row);
    this.line.style.transform = `translateY(${this.thresholdY()}px)`;
    this.line.style.left = `${frame.left}px`;
    this.line.style.width = `${frame.width}px`;
    const one = detail.series[row];
    this.fired = verdict(detail.values[row], detail.count, one.threshold, one.pool);
    this.would =
      threshold === one.threshold ? this.fired : verdict(detail.values[row], detail.count, threshold, one.pool);
    this.line.setAttribute("aria-valuemin", String(this.low));
    this.line.setAttribute("aria-valuemax", String(this.high));
    this.line.setAttribute("aria-valuenow", String(threshold));
    this.line.setAttribute("aria-valuetext", `${number(threshold)}: ${this.would}`);
    this.drawHead();
  }

  /** Return the height of the threshold in the plot, px. */
  thresholdY() {
    const part = (this.high - this.page.threshold(this.row)) / (this.high - this.low);
    return PAD_PX + part * (PLOT_PX - 2 * PAD_PX);
  }

  /** Make room for all scores and both thresholds; room is never given back, so that the curve stays where it is. */
  range() {
    const { detail } = this.page;
    if (!detail) return;
    const { low, high } = detail.ranges[this.row];
    const given = detail.series[this.row].threshold;
    const moved = this.page.threshold(this.row);
    const least = Math.min(given, moved, low < Infinity ? low : given);
    const most = Math.max(given, moved, high > -Infinity ? high : given);
    const pad = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
    [this.low, this.high] = [least - pad, most + pad];
  }

  drawHead() {
    const { page, row } = this;
    const { detail } = page;
    if (!detail) return;
    const one = detail.series[row];
    const values = detail.values[row];
    const moved = page.place.thresholds.get(seriesName(one));
    const pool = one.pool === "token" ? "each token" : `the request's ${one.pool}`;
    const { column } = page;
    render(
      html`<i class="swatch" aria-hidden="true"></i><bdi class="track-name">${visible(one.probe)}</bdi>
        <span class="soft track-site">${one.site}, ${pool}</span><span class="gap"></span>
        ${
          column === null
            ? nothing
            : html`<span class="nowrap track-value">${number(
                values[column] === -Infinity ? null : values[column],
              )}</span>`
        }
        <span class="nowrap"><span class="soft">fires from ${number(one.threshold)}:</span> ${this.fired}</span>
        ${
          moved === undefined
            ? nothing
            : html`<span class="nowrap moved">from ${number(moved)} would: <b>${this.would}</b></span>
          <button type="button" class="small" @click=${() => page.moveThreshold(row, null)}>Reset</button>`
        }`,
      this.head,
    );
  }

  /** @param {PointerEvent} event */
  drag(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    event.stopPropagation();
    this.line.focus();
    this.line.setPointerCapture(event.pointerId);
    const [startY, start] = [event.clientY, this.page.threshold(this.row)];
    const perPx = (this.high - this.low) / (PLOT_PX - 2 * PAD_PX);
    const move = (/** @type {PointerEvent} */ moved) => {
      this.page.moveThreshold(this.row, Number((start - (moved.clientY - startY) * perPx).toPrecision(4)));
    };
    const stop = () => this.line.removeEventListener("pointermove", move);
    this.line.addEventListener("pointermove", move);
    this.line.addEventListener("lostpointercapture", stop, { once: true });
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = (this.high - this.low) / STEPS;
    const ways = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 };
    const way = ways[/** @type {keyof ways} */ (event.key)];
    if (way) this.page.moveThreshold(this.row, Number((this.page.threshold(this.row) + way * step).toPrecision(4)));
    else if (event.key === "Home" || event.key === "Delete") this.page.moveThreshold(this.row, null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** The curves of all probes of the shown request. */
export class Tracks {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   * @param {{left: number, width: number, right: number}} frame
   */
  constructor(box, page, frame) {
    this.box = box;
    this.page = page;
    this.frame = frame;
    /** @type {Track[]} */
    this.tracks = [];
    this.made = "";
  }

  draw() {
    const { detail } = this.page;
    const rows = detail?.probes ?? [];
    const made = `${this.page.key} ${this.frame.left} ${rows
      .map((row) => detail && seriesName(detail.series[row]))
      .join()}`;
    if (made !== this.made) {
      this.tracks = rows.map((row, place) => new Track(row, place, this.page, this.frame));
      this.box.replaceChildren(...this.tracks.map((track) => track.box));
      this.made = made;
    }
    this.box.hidden = !rows.length;
    for (const track of this.tracks) track.draw();
  }

  drawCursor() {
    for (const track of this.tracks) track.drawHead();
  }
}
