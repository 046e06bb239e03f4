// @ts-check
// Plots: what has the tokens as its axis: the overview, the steered spans, the curves and the heatmap. They share one
// span and one cursor.

import { farthest, spans } from "./bins.js";
import { number, plural } from "./format.js";
import { Heatmap, pixelOf } from "./heatmap.js";
import { font, ink, pattern, sized, theme } from "./inks.js";
import { html, nothing, render } from "./lit.js";
import { colours } from "./palette.js";
import { ODD, TITLES } from "./scale.js";
import { Tracks } from "./tracks.js";

/** @typedef {import("./page.js").Page} Page */

const RIGHT_PX = 14;
const DRAG_PX = 5;
const GLYPHS = {
  steer: "▼",
  unsteer: "△",
  gain: "◆",
  set_gate: "◇",
  gate: "◇",
  abort: "✕",
  lease_end: "△",
  freeze: "■",
  unfreeze: "□",
  overflow: "!",
};

export class Plots {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    render(
      html`<div class="over-box"><span class="gutter-name" aria-hidden="true">all</span><canvas class="over-canvas"
        aria-hidden="true"></canvas>
          <div class="brush" aria-hidden="true"><i class="edge left"></i><i class="edge right"></i></div></div>
        <div class="lane-box" hidden><span class="gutter-name" aria-hidden="true">steered</span><canvas
          class="lane-canvas" role="img"></canvas></div>
        <div class="tracks" role="group" aria-label="Scores of the probes"></div>
        <div class="heat-head"></div>
        <div class="heat" id="heat" role="slider" tabindex="0" aria-roledescription="heatmap"
          aria-orientation="horizontal"
          aria-label="Heatmap of layers by tokens. Arrow keys move the cursor."></div>
        <output class="readout" id="heat-value" aria-live="off"></output>
        <div class="crosshair" hidden></div><div class="selection" hidden></div>`,
      box,
    );
    const find = (/** @type {string} */ name) => /** @type {HTMLElement} */ (box.querySelector(name));
    this.overBox = find(".over-box");
    this.over = /** @type {HTMLCanvasElement} */ (find(".over-canvas"));
    this.brush = find(".brush");
    this.laneBox = find(".lane-box");
    this.lane = /** @type {HTMLCanvasElement} */ (find(".lane-canvas"));
    this.heatHead = find(".heat-head");
    this.readout = find(".readout");
    this.crosshair = find(".crosshair");
    this.selection = find(".selection");
    /** Where the columns are, in pixels of the box. @type {import("./heatmap.js").Frame} */
    this.frame = { left: 60, width: 0, right: RIGHT_PX };
    this.heatBox = find(".heat");
    this.heatmap = new Heatmap(this.heatBox, page, this.frame);
    this.tracks = new Tracks(find(".tracks"), page, this.frame);
    this.image = document.createElement("canvas");
    new ResizeObserver(([entry]) => {
      const { width } = entry.contentRect;
      this.frame.left = width < 520 ? 44 : 60;
      this.frame.width = Math.max(0, width - this.frame.left - RIGHT_PX);
      page.frames.draw("plots", "plots-cursor");
    }).observe(box);
    this.listen();
  }

  draw() {
    const { page } = this;
    if (!page.detail || this.frame.width <= 0) return;
    page.span.grow(page.detail.count);
    this.drawOverview();
    this.drawLane();
    this.tracks.draw();
    this.drawHeatHead();
    this.heatmap.draw();
  }

  /** @param {number} column */
  xOf(column) {
    const { span } = this.page;
    return this.frame.left + ((column - span.from + 0.5) / span.width) * this.frame.width;
  }

  /**
   * Return the column at a place of the window; null beside the columns.
   * @param {number} clientX
   * @param {boolean} [clip]
   */
  columnAt(clientX, clip = false) {
    const { span, detail } = this.page;
    const part = (clientX - this.box.getBoundingClientRect().left - this.frame.left) / this.frame.width;
    if (!detail || (!clip && (part < 0 || part >= 1))) return null;
    const column = span.from + Math.floor(Math.max(0, Math.min(0.9999, part)) * span.width);
    return column < detail.count || clip ? column : null;
  }

  drawOverview() {
    const { page, frame } = this;
    const { detail, measured, span } = page;
    if (!detail || measured < 0) return;
    const height = 18;
    const context = sized(this.over, frame.left + frame.width, height);
    const cells = Math.max(1, Math.min(span.most, Math.ceil(frame.width * (devicePixelRatio || 1))));
    const bins = new Float32Array(cells);
    const scale = page.scale(measured);
    const centre =
      scale.kind === "probe" ? (scale.low + scale.high) / 2 : scale.diverging ? (scale.reference?.median ?? 0) : 0;
    farthest(detail.values[measured], 0, span.most, centre, bins);
    const image = new ImageData(cells, 1);
    const pixels = new Uint32Array(image.data.buffer);
    const palette = colours(theme(), scale.diverging);
    const [plain, bad] = [pixelOf(ink("--plain")), pixelOf(ink("--bad"))];
    for (let cell = 0; cell < cells; cell++) {
      if ((cell * span.most) / cells >= detail.count) continue;
      const step = scale.step(bins[cell]);
      if (step >= 0) pixels[cell] = palette[step].pixel;
      else if (step === ODD) pixels[cell] = bad;
      else if (step === -1) pixels[cell] = plain;
    }
    [this.image.width, this.image.height] = [cells, 1];
    this.image.getContext("2d")?.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, 0, 0, cells, 1, frame.left, 2, frame.width, height - 7);
    context.fillStyle = ink("--steer");
    const cellPx = frame.width / span.most;
    for (const [first, end] of spans(detail.steered, 0, detail.count)) {
      context.fillRect(frame.left + first * cellPx, height - 4, Math.max(1.5, (end - first) * cellPx), 3);
    }
    this.brush.style.transform = `translateX(${frame.left + span.from * cellPx}px)`;
    this.brush.style.width = `${span.width * cellPx}px`;
    this.brush.classList.toggle("whole", span.whole);
  }

  drawLane() {
    const { page, frame } = this;
    const { detail, span } = page;
    if (!detail) return;
    const events = detail.events.filter((event) => event.position !== null);
    const all = spans(detail.steered, 0, detail.count);
    this.laneBox.hidden = !all.length && !events.length;
    if (this.laneBox.hidden) return;
    const height = 20;
    const context = sized(this.lane, frame.left + frame.width + RIGHT_PX, height);
    const cellPx = frame.width / span.width;
    context.save();
    context.beginPath();
    context.rect(frame.left, 0, frame.width, height);
    context.clip();
    for (const [first, end] of spans(detail.steered, span.from, Math.min(span.to, detail.count))) {
      const [x, width] = [frame.left + (first - span.from) * cellPx, Math.max(2, (end - first) * cellPx)];
      context.fillStyle = ink("--steer-soft");
      context.fillRect(x, 6, width, 12);
      context.fillStyle = pattern(context, "stripes", ink("--steer"));
      context.fillRect(x, 6, width, 12);
      context.strokeStyle = ink("--steer");
      context.strokeRect(x + 0.5, 6.5, Math.max(1, width - 1), 11);
    }
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = font("700");
    for (const event of events) {
      const column = Number(event.position) - detail.base;
      if (column < span.from || column >= span.to) continue;
      const x = frame.left + (column - span.from + 0.5) * cellPx;
      context.fillStyle = ink("--panel");
      context.beginPath();
      context.arc(x, 10, 7, 0, 7);
      context.fill();
      context.fillStyle = ink(event.outcome === "rejected" ? "--bad" : "--steer");
      context.fillText(GLYPHS[/** @type {keyof GLYPHS} */ (event.kind)] ?? "•", x, 10.5);
    }
    context.restore();
    const runs = all.map(([first, end]) => `${detail.base + first} to ${detail.base + end - 1}`).slice(0, 8);
    const text = runs.length ? `Steered at positions ${runs.join(", ")}` : "Not steered";
    this.lane.setAttribute("aria-label", `${text}; ${plural(events.length, "steering event")}`);
  }

  drawHeatHead() {
    const { page } = this;
    const { detail, place } = page;
    if (!detail) return;
    const { scales } = page.heat();
    const scale = scales[0];
    const modes = /** @type {const} */ ([
      ["norms", "Norms", detail.norms.length > 0, "Norms, on the chosen scale"],
      [
        "change",
        "Change",
        detail.baseline !== null && detail.norms.length > 0,
        "Norms as the deviation from the baseline",
      ],
      ["probes", "Probes", detail.probes.length > 0, "Scores, each centred at its threshold"],
    ]);
    const shown =
      place.heat === "change" && !detail.baseline
        ? "norms"
        : place.heat === "probes" && !detail.probes.length
          ? "norms"
          : place.heat;
    render(
      html`<div class="segments" role="group" aria-label="The heatmap shows">${modes.map(
        ([mode, name, possible, title]) =>
          possible
            ? html`<button type="button" aria-pressed=${shown === mode ? "true" : "false"}
            title=${title} @click=${() => page.recolour({ heat: mode })}>${name}</button>`
            : nothing,
      )}</div>
        <span class="gap"></span>
        ${
          scale?.kind === "probe"
            ? html`<span class="soft nowrap">each centred at its threshold</span><span class="bar div"
              aria-hidden="true"></span>`
            : legend(scale)
        }
        <span class="zoom" role="group" aria-label="Zoom">
          <button type="button" class="small" aria-label="Zoom out" title="Zoom out (−)" @click=${() =>
            this.zoom(2)}>−</button>
          <button type="button" class="small" aria-label="Zoom in" title="Zoom in (+)" @click=${() =>
            this.zoom(0.5)}>+</button>
          <button type="button" class="small" ?disabled=${page.span.whole} title="Show all (0)" @click=${() =>
            this.fit()}>All</button>
        </span>`,
      this.heatHead,
    );
  }

  drawCursor() {
    const { page } = this;
    const { column, span } = page;
    const inside = column !== null && column >= span.from && column < span.to;
    this.crosshair.hidden = !inside;
    if (inside && column !== null) this.crosshair.style.transform = `translateX(${this.xOf(column)}px)`;
    this.heatmap.drawCursor();
    this.tracks.drawCursor();
    this.readout.textContent = this.heatmap.readout();
  }

  /** @param {number} factor */
  zoom(factor) {
    const { page } = this;
    const { cursor, span } = page;
    const inside = cursor !== null && cursor >= span.from && cursor < span.to;
    span.zoom(factor, inside ? cursor : undefined);
    page.spanned();
  }

  fit() {
    this.page.span.fit();
    this.page.spanned();
  }

  /** @param {number} part of the width */
  pan(part) {
    this.page.span.pan(Math.max(1, Math.round(this.page.span.width * Math.abs(part))) * Math.sign(part));
    this.page.spanned();
  }

  listen() {
    const { box, page } = this;
    box.addEventListener("pointermove", (event) => {
      if (event.buttons === 0 && !this.isBrush(event.target)) page.over(this.columnAt(event.clientX));
    });
    box.addEventListener("pointerleave", () => page.over(null));
    box.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || this.isControl(event.target)) return;
      if (this.isBrush(event.target)) this.dragBrush(event);
      else this.dragSpan(event);
    });
    box.addEventListener("dblclick", (event) => {
      if (!this.isControl(event.target)) this.fit();
    });
    box.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) {
          const at = this.columnAt(event.clientX, true);
          page.span.zoom(event.deltaY > 0 ? 1.25 : 0.8, at ?? undefined);
        } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          const pixels = event.deltaX || event.deltaY;
          page.span.pan(Math.round((pixels / this.frame.width) * page.span.width) || Math.sign(pixels));
        } else return;
        event.preventDefault();
        page.spanned();
      },
      { passive: false },
    );
  }

  /** @param {EventTarget | null} target */
  isControl(target) {
    return target instanceof Element && target.closest("button, .track-head, .threshold, .heat-head") !== null;
  }

  /** @param {EventTarget | null} target */
  isBrush(target) {
    return target instanceof Element && target.closest(".over-box") !== null;
  }

  /**
   * A click chooses a token, a drag chooses a span.
   * @param {PointerEvent} event
   */
  dragSpan(event) {
    const { box, page, selection } = this;
    const start = this.columnAt(event.clientX);
    if (start === null) return;
    const row =
      event.target instanceof Node && this.heatBox.contains(event.target)
        ? this.heatmap.rowAt(event.clientY - this.heatBox.getBoundingClientRect().top)
        : null;
    const move = (/** @type {PointerEvent} */ moved) => {
      selection.hidden = Math.abs(moved.clientX - event.clientX) < DRAG_PX;
      const [from, to] = [start, this.columnAt(moved.clientX, true) ?? start].sort((a, b) => a - b);
      const left = this.xOf(from - 0.5);
      selection.style.transform = `translateX(${left}px)`;
      selection.style.width = `${this.xOf(to + 0.5) - left}px`;
      page.over(this.columnAt(moved.clientX));
    };
    const stop = (/** @type {PointerEvent} */ stopped) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      removeEventListener("pointercancel", stop);
      const dragged = !selection.hidden;
      selection.hidden = true;
      if (stopped.type !== "pointerup") return;
      if (dragged) {
        const [from, to] = [start, this.columnAt(stopped.clientX, true) ?? start].sort((a, b) => a - b);
        page.span.set(from, to + 1);
        page.spanned();
      } else {
        if (row !== null && !page.detail?.series[row].probe) this.choose(row);
        page.point(start, false);
        this.onChosen();
      }
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
    box.focus?.();
  }

  /** Called when a token was chosen in a plot. */
  onChosen = () => {};

  /**
   * Mark the layer that was clicked; what colours the tokens stays.
   * @param {number} row
   */
  choose(row) {
    const { page } = this;
    const { measured, detail } = page;
    if (detail && measured >= 0 && detail.series[measured].probe) page.mark(row);
  }

  /** @param {PointerEvent} event */
  dragBrush(event) {
    const { page, frame } = this;
    const { span } = page;
    event.preventDefault();
    const left = this.overBox.getBoundingClientRect().left + frame.left;
    const at = (/** @type {PointerEvent} */ one) => ((one.clientX - left) / frame.width) * span.most;
    const edge = event.target instanceof Element ? event.target.closest(".edge") : null;
    const start = at(event);
    if (!edge && (start < span.from || start >= span.to)) span.set(start - span.width / 2, start + span.width / 2);
    const [from, to] = [span.from, span.to];
    page.spanned();
    const move = (/** @type {PointerEvent} */ moved) => {
      const by = at(moved) - start;
      if (edge?.classList.contains("left")) span.set(Math.min(from + by, to - 8), to);
      else if (edge) span.set(from, Math.max(to + by, from + 8));
      else span.set(from + by, to + by);
      page.spanned();
    };
    const stop = () => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      removeEventListener("pointercancel", stop);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
  }
}

/**
 * Return the legend of a scale: its colours and its ends.
 * @param {import("./scale.js").Scale | undefined} scale
 */
export function legend(scale) {
  if (!scale?.reference?.rows) return nothing;
  const title = TITLES[scale.kind];
  return html`<span class="legend" role="img"
    aria-label="Colours from ${number(scale.low)} to ${number(scale.high)}: ${title}"
    title=${title}><span>≤ ${number(scale.low)}</span><span
      class="bar ${scale.diverging ? "div" : "seq"}"></span><span>≥ ${number(scale.high)}</span></span>`;
}
