// @ts-check
// Heatmap: one line for each layer or probe, one cell for each token, drawn as an image of one pixel a cell and scaled.

import { farthest } from "./bins.js";
import { number, show } from "./format.js";
import { font, ink, pattern, sized, theme } from "./inks.js";
import { colours } from "./palette.js";
import { ABSENT, ODD, TITLES } from "./scale.js";
import { ticks } from "./span.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {{left: number, width: number, right: number}} Frame where the columns are, in pixels of the box */

const AXIS_PX = 20;
const LABEL_PX = 13;

export class Heatmap {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   * @param {Frame} frame
   */
  constructor(box, page, frame) {
    this.box = box;
    this.page = page;
    this.frame = frame;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "heat-canvas";
    this.canvas.setAttribute("aria-hidden", "true");
    this.mark = document.createElement("div");
    this.mark.className = "row-mark";
    box.append(this.canvas, this.mark);
    this.image = document.createElement("canvas");
    this.mask = document.createElement("canvas");
    this.height = 0;
    /** The series of each line, from the bottom. @type {number[]} */
    this.rows = [];
    /** The values as they are binned. */
    this.bins = new Float32Array(1);
    new ResizeObserver(([entry]) => {
      this.height = entry.contentRect.height;
      page.frames.draw("plots", "plots-cursor");
    }).observe(box);
    box.addEventListener("keydown", (event) => this.onKey(event));
    box.addEventListener("focus", () => {
      if (page.cursor === null && page.detail) page.point(page.span.from);
    });
  }

  get plotPx() {
    return Math.max(0, this.height - AXIS_PX);
  }

  draw() {
    const { page, frame, canvas } = this;
    const { detail, span } = page;
    const context = sized(canvas, frame.left + frame.width + 2, this.height);
    const { rows, scales } = page.heat();
    this.rows = rows;
    if (!detail || !rows.length || frame.width <= 0 || this.plotPx <= 0) return;
    const pixels = Math.ceil(frame.width * (devicePixelRatio || 1));
    const cells = Math.min(span.width, pixels);
    if (this.bins.length !== cells) this.bins = new Float32Array(cells);
    const count = detail.count;
    const picture = layer(cells, rows.length);
    /** The cells with NaN or infinity, and those without a row; most pictures have none. @type {Layer | null} */
    let odd = null;
    /** @type {Layer | null} */
    let absent = null;
    const plain = pixelOf(ink("--plain"));
    for (let line = 0; line < rows.length; line++) {
      const scale = scales[line];
      const palette = colours(theme(), scale.diverging);
      const centre =
        scale.kind === "probe" ? (scale.low + scale.high) / 2 : scale.diverging ? (scale.reference?.median ?? 0) : 0;
      farthest(detail.values[rows[line]], span.from, span.to, centre, this.bins);
      const offset = (rows.length - 1 - line) * cells;
      for (let cell = 0; cell < cells; cell++) {
        const beyond = span.from + (cell * span.width) / cells >= count;
        const step = beyond ? ABSENT : scale.step(this.bins[cell]);
        if (step >= 0) picture.pixels[offset + cell] = palette[step].pixel;
        else if (step === ODD) {
          odd ??= layer(cells, rows.length);
          odd.pixels[offset + cell] = 0xff000000;
        } else if (step === ABSENT) {
          if (!beyond) {
            absent ??= layer(cells, rows.length);
            absent.pixels[offset + cell] = 0xff000000;
          }
        } else picture.pixels[offset + cell] = plain;
      }
    }
    context.imageSmoothingEnabled = false;
    const area = /** @type {const} */ ([frame.left, 0, frame.width, this.plotPx]);
    this.put(context, picture.image, area);
    if (absent) this.putPattern(context, absent.image, area, "dots", ink("--ink-soft"));
    if (odd) this.putPattern(context, odd.image, area, "stripes", ink("--bad"));
    this.drawAxes(context, scales);
    this.describe();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {ImageData} image
   * @param {readonly [number, number, number, number]} area
   */
  put(context, image, [x, y, width, height]) {
    [this.image.width, this.image.height] = [image.width, image.height];
    this.image.getContext("2d")?.putImageData(image, 0, 0);
    context.drawImage(this.image, 0, 0, image.width, image.height, x, y, width, height);
  }

  /**
   * Draw a pattern where an image has pixels.
   * @param {CanvasRenderingContext2D} context
   * @param {ImageData} image
   * @param {readonly [number, number, number, number]} area
   * @param {"stripes" | "dots"} kind
   * @param {string} colour
   */
  putPattern(context, image, area, kind, colour) {
    const [x, y, width, height] = area;
    const mask = sized(this.mask, width, height);
    mask.globalCompositeOperation = "source-over";
    mask.imageSmoothingEnabled = false;
    this.put(mask, image, [0, 0, width, height]);
    mask.globalCompositeOperation = "source-in";
    mask.fillStyle = pattern(mask, kind, colour);
    mask.fillRect(0, 0, width, height);
    context.drawImage(this.mask, 0, 0, this.mask.width, this.mask.height, x, y, width, height);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {import("./scale.js").Scale[]} scales
   */
  drawAxes(context, scales) {
    const { page, frame, rows, plotPx } = this;
    const { detail, span } = page;
    if (!detail) return;
    context.fillStyle = ink("--ink-soft");
    context.font = font();
    context.textBaseline = "middle";
    context.textAlign = "right";
    const rowPx = plotPx / rows.length;
    const each = Math.max(1, Math.ceil(LABEL_PX / rowPx));
    const hooks = new Set(rows.map((row) => detail.series[row].hook)).size;
    for (let line = 0; line < rows.length; line += each) {
      const one = detail.series[rows[line]];
      const text =
        one.probe || (hooks > 1 ? `${one.hook.replace(/^(.).*_(.).*$/, "$1$2")} ${one.layer}` : `L${one.layer}`);
      const short = text.length > 8 ? `${text.slice(0, 7)}…` : text;
      context.fillText(short, frame.left - 6, plotPx - (line + 0.5) * rowPx);
    }
    context.textAlign = "center";
    const cellPx = frame.width / span.width;
    for (const position of ticks(detail.base + span.from, detail.base + span.to, frame.width / 90)) {
      const x = frame.left + (position - detail.base - span.from + 0.5) * cellPx;
      context.fillRect(Math.round(x), plotPx, 1, 4);
      if (x > frame.left + frame.width - 12) continue;
      context.fillText(position.toLocaleString("en"), x, plotPx + 12);
    }
    this.box.dataset.kind = scales[0]?.kind ?? "";
  }

  /** Mark the layer, and say what the cell of the cursor is. */
  drawCursor() {
    const { page, rows } = this;
    const { detail } = page;
    const line = rows.indexOf(page.layer);
    const rowPx = rows.length ? this.plotPx / rows.length : 0;
    this.mark.hidden = line < 0 || !detail;
    if (line >= 0) {
      this.mark.style.transform = `translate(${this.frame.left}px, ${this.plotPx - (line + 1) * rowPx}px)`;
      this.mark.style.width = `${Math.max(0, this.frame.width)}px`;
      this.mark.style.height = `${rowPx}px`;
    }
    this.describe();
  }

  /** Say to a screen reader where the cursor is, and what the cell there holds. */
  describe() {
    const { box } = this;
    const { detail, column } = this.page;
    box.setAttribute("aria-valuemax", String(detail ? Math.max(0, detail.base + detail.count - 1) : 0));
    box.setAttribute("aria-valuemin", String(detail?.base ?? 0));
    box.setAttribute("aria-valuenow", String(detail && column !== null ? detail.base + column : (detail?.base ?? 0)));
    box.setAttribute("aria-valuetext", this.readout() || "no token chosen");
  }

  /** Return what the cell at the cursor and the marked layer holds. */
  readout() {
    const { page } = this;
    const { detail, column } = page;
    if (!detail || column === null) return "";
    const { rows, scales } = page.heat();
    const line = Math.max(0, rows.indexOf(page.layer));
    if (!rows.length) return "";
    const value = detail.values[rows[line]][column];
    const scale = scales[line];
    const shown =
      scale.kind === "raw" || scale.kind === "probe" || !scale.reference || !Number.isFinite(value)
        ? ""
        : `, ${TITLES[scale.kind]} ${number(scale.number(value))}`;
    const one = detail.series[rows[line]];
    const name = one.probe ? `${one.probe} at ${one.site}` : one.site;
    return `position ${detail.base + column}, ${name}: ${show(value)}${shown}`;
  }

  /**
   * Return the series of the line at a height of the box.
   * @param {number} y
   */
  rowAt(y) {
    if (!this.rows.length || y < 0 || y >= this.plotPx) return null;
    return this.rows[this.rows.length - 1 - Math.floor((y / this.plotPx) * this.rows.length)] ?? null;
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { page } = this;
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) page.point((page.cursor ?? 0) + step);
    else if (event.key === "ArrowUp") page.moveLayer(1);
    else if (event.key === "ArrowDown") page.moveLayer(-1);
    else if (event.key === "Enter") page.colourBy(page.layer);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/**
 * Return an `rgb(…)` colour as a pixel.
 * @param {string} colour
 */
export function pixelOf(colour) {
  const [r = 128, g = 128, b = 128] = colour.match(/[\d.]+/g)?.map(Number) ?? [];
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** @typedef {{image: ImageData, pixels: Uint32Array}} Layer */

/**
 * Return an empty image, and its pixels as numbers.
 * @param {number} width
 * @param {number} height
 * @returns {Layer}
 */
function layer(width, height) {
  const image = new ImageData(width, height);
  return { image, pixels: new Uint32Array(image.data.buffer) };
}
