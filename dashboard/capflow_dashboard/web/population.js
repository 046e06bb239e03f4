// @ts-check
// Population: the scores of a probe over all tokens and all finished requests, what a threshold would fire at, and how
// often the probe fires.

import { count, number, plural, visible } from "./format.js";
import { font, ink, pattern, sized } from "./inks.js";
import { html, nothing, render } from "./lit.js";
import { seriesName } from "./page.js";
import { band, compose } from "./picture.js";
import { levels } from "./span.js";
import { drawCurve } from "./strip.js";
import { nearest, outcome, percent, shares, total } from "./tally.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./protocol.js").Population} Shown */

const FRAME = { left: 60, right: 14 };
const HIST_PX = 190;
const AXIS_PX = 20;
const RATE_PX = 92;
/** The parts of a bar of requests, from below: without a label, negative, positive. */
const PARTS = /** @type {const} */ (["unlabelled", "negative", "positive"]);
const SECONDS = 120;
const MINUTES = 60;

export class PopulationView {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    box.setAttribute("aria-labelledby", "population-title");
    render(
      html`<div class="population-head"></div><div class="population-body">
        <dl class="tiles" id="population-tiles"></dl><div class="scroll" id="population-labels" role="region"
          aria-label="Labelled requests" tabindex="0" hidden></div>
        <section class="card-box"><h3 id="tokens-title">By token</h3><div class="hist" data-of="tokens"><canvas
          role="img"
          aria-labelledby="tokens-title"></canvas>
          <div class="edge-line" role="slider" tabindex="0"></div></div></section>
        <section class="card-box"><h3 id="requests-title">By finished request</h3><div class="legend-line"
          id="population-legend"></div><div class="hist" data-of="requests"><canvas role="img"
          aria-labelledby="requests-title"></canvas><div class="edge-line" role="slider" tabindex="-1"
          aria-hidden="true"></div></div></section>
        <section class="card-box"><h3 id="seconds-title">Fired, last 120 seconds</h3><canvas role="img"
          aria-labelledby="seconds-title"></canvas></section>
        <section class="card-box"><h3 id="minutes-title">Fired, last 60 minutes</h3><canvas role="img"
          aria-labelledby="minutes-title"></canvas></section></div>`,
      box,
    );
    const find = (/** @type {string} */ name) => /** @type {HTMLElement} */ (box.querySelector(name));
    this.head = find(".population-head");
    this.body = find(".population-body");
    this.tiles = find("#population-tiles");
    this.labels = find("#population-labels");
    this.legend = find("#population-legend");
    this.canvases = /** @type {HTMLCanvasElement[]} */ ([...box.querySelectorAll("canvas")]);
    this.lines = /** @type {HTMLElement[]} */ ([...box.querySelectorAll(".edge-line")]);
    this.log = false;
    this.widths = [0, 0, 0, 0];
    const look = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) {
        this.widths[[...box.querySelectorAll(".card-box")].indexOf(target)] = contentRect.width;
      }
      page.frames.draw("extra");
    });
    for (const card of box.querySelectorAll(".card-box")) look.observe(card);
    for (const line of this.lines) {
      line.addEventListener("keydown", (event) => this.onKey(event));
      line.addEventListener("pointerdown", (event) => this.drag(event, line));
      line.addEventListener("dblclick", () => this.move(null));
    }
  }

  /** The population of the page's engine and probe; null until it is there. */
  get shown() {
    const { population } = this.page.store;
    const { engine, probe } = this.page.populated;
    return population && population.engine === engine && population.probe === probe ? population : null;
  }

  /** @param {Shown} shown */
  edgeOf(shown) {
    // The threshold of the file is an edge.
    const given = nearest(shown.edges, shown.threshold);
    const score = this.page.place.thresholds.get(seriesName(shown));
    return { given, edge: score === undefined ? given : nearest(shown.edges, score) };
  }

  /**
   * Move the threshold to an edge; null for that of the file.
   * @param {number | null} edge
   */
  move(edge) {
    const { shown } = this;
    if (!shown) return;
    const { edges } = shown;
    const usual = edge === null || edge === this.edgeOf(shown).given;
    this.page.keepThreshold(seriesName(shown), usual ? null : edges[Math.max(0, Math.min(edges.length - 1, edge))]);
    this.page.frames.draw("extra");
  }

  draw() {
    const { shown } = this;
    this.drawHead();
    this.body.hidden = !shown;
    if (!shown) return;
    const { given, edge } = this.edgeOf(shown);
    const now = outcome(shown, edge);
    const unit = shown.pool === "token" ? "tokens" : "requests";
    const threshold = shown.edges[edge];
    render(
      html`<div><dt>threshold</dt><dd id="population-threshold">${number(threshold)}</dd></div>
        <div><dt>tokens that fire</dt><dd id="population-tokens">${count(now.tokens)} of ${count(now.ofTokens)}
          <small class="soft">${percent(now.tokens, now.ofTokens)}</small></dd></div>
        <div><dt>requests that fire</dt><dd id="population-requests">${count(now.requests)} of ${count(now.ofRequests)}
          <small class="soft">${percent(now.requests, now.ofRequests)}</small></dd></div>
        <div><dt>scores without a number</dt><dd>${count(shown.odd)}</dd></div>`,
      this.tiles,
    );
    const labelled = total(shown.requests[1]) + total(shown.requests[2]);
    this.labels.hidden = !shown.labels;
    render(
      shown.labels
        ? html`<table class="health-table"><thead><tr><th scope="col">${plural(labelled, "labelled request")}</th>
        <th scope="col">fires</th><th scope="col">does not</th><th scope="col"></th></tr></thead><tbody>
        <tr><th scope="row">positive</th><td>${count(now.truePositives)}</td><td id="population-fn">${count(
          now.falseNegatives,
        )} <span class="soft">false negatives</span></td><td>recall ${
          now.recall === null ? "–" : percent(now.recall, 1)
        }</td></tr>
        <tr><th scope="row">negative</th><td id="population-fp">${count(
          now.falsePositives,
        )} <span class="soft">false positives</span></td><td>${count(now.trueNegatives)}</td><td>precision ${
          now.precision === null ? "–" : percent(now.precision, 1)
        }</td></tr></tbody></table>`
        : nothing,
      this.labels,
    );
    render(
      shown.labels
        ? PARTS.map(
            (part) => html`<span class="nowrap"><i class="part-key ${part}" aria-hidden="true"></i> ${part}</span>`,
          )
        : nothing,
      this.legend,
    );
    const [tokens, requests, seconds, minutes] = this.canvases;
    this.drawHistogram(tokens, this.widths[0], shown, [shown.tokens], edge, given);
    this.drawHistogram(requests, this.widths[1], shown, shown.requests, edge, given);
    this.drawRate(seconds, this.widths[2], shown.seconds, SECONDS);
    this.drawRate(minutes, this.widths[3], shown.minutes, MINUTES);
    const say = `${plural(now.tokens, "token")} and ${plural(now.requests, "request")} fire`;
    tokens.setAttribute(
      "aria-label",
      `Histogram of ${count(now.ofTokens)} scores; from ${number(threshold)} on ${say}`,
    );
    requests.setAttribute("aria-label", `Histogram of ${plural(now.ofRequests, "finished request")}`);
    for (const [canvas, counts] of /** @type {const} */ ([
      [seconds, shown.seconds],
      [minutes, shown.minutes],
    ])) {
      const fired = counts.reduce((sum, [, one]) => sum + one, 0);
      const all = counts.reduce((sum, [one]) => sum + one, 0);
      canvas.setAttribute("aria-label", `${count(fired)} of ${count(all)} ${unit} fired, ${percent(fired, all)}`);
    }
    const [line] = this.lines;
    line.setAttribute("aria-label", `Threshold of ${shown.probe}`);
    line.setAttribute("aria-valuemin", String(shown.edges[0]));
    line.setAttribute("aria-valuemax", String(shown.edges.at(-1)));
    line.setAttribute("aria-valuenow", String(threshold));
    line.setAttribute("aria-valuetext", `${number(threshold)}: ${say}`);
  }

  drawHead() {
    const { page, shown } = this;
    const { store } = page;
    const { engine, probe } = page.populated;
    const engines = store.engines.filter((one) => one.probes.length);
    const probes = store.engine(engine)?.probes ?? [];
    const choose = (/** @type {any} */ changes) => {
      page.go(changes);
      page.onSubscription();
      page.frames.draw("extra");
    };
    const moved = shown && page.place.thresholds.has(seriesName(shown));
    render(
      html`<h2 id="population-title">Population</h2>
        ${
          engines.length > 1
            ? html`<label class="field"><span>Engine</span><select id="population-engine" @change=${(
                /** @type {any} */ event,
              ) => choose({ engine: event.target.value, id: "" })}>${engines.map(
                ({ name }) => html`<option value=${name} ?selected=${name === engine}>${visible(name)}</option>`,
              )}</select></label>`
            : nothing
        }${
          probes.length
            ? html`<label class="field"><span>Probe</span><select id="population-probe" @change=${(
                /** @type {any} */ event,
              ) => choose({ probe: event.target.value })}>${probes.map(
                (one) => html`<option value=${one.name} ?selected=${one.name === probe}>${visible(one.name)}
                (${one.site})</option>`,
              )}</select></label>
          <button type="button" class="toggle" id="population-log" aria-pressed=${this.log ? "true" : "false"}
            @click=${() => {
              this.log = !this.log;
              page.frames.draw("extra");
            }}>Log counts</button>`
            : nothing
        }${
          moved
            ? html`<button type="button" class="small" id="population-reset" @click=${() => this.move(null)}>Reset to
            ${number(shown.threshold)}</button>`
            : nothing
        }<p class="soft">${
          shown
            ? `All scores since the engine was first met. ${
                shown.pool === "token" ? "A request has its highest score." : `A request has its ${shown.pool}.`
              }${shown.fixed ? "" : " The bins are fixed after 512 tokens."} Drag the threshold, or use the arrow keys.`
            : engines.length
              ? "Loading…"
              : "No engine with a probe. Name probe files with probes=FILE when the dashboard is started."
        }</p>`,
      this.head,
    );
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {number} width
   * @param {Shown} shown
   * @param {number[][]} parts
   * @param {number} edge
   * @param {number} given
   */
  drawHistogram(canvas, width, shown, parts, edge, given) {
    const { edges } = shown;
    const bins = edges.length - 1;
    const plot = width - FRAME.left - FRAME.right;
    if (plot <= 0) return;
    const context = sized(canvas, width, HIST_PX);
    const bottom = HIST_PX - AXIS_PX;
    const barPx = plot / (bins + 2);
    const sums = parts[0].map((_, bin) => parts.reduce((sum, counts) => sum + counts[bin], 0));
    const scaled = (/** @type {number} */ value) => (this.log ? Math.log10(1 + value) : value);
    const most = Math.max(1, ...sums);
    const y = (/** @type {number} */ value) => bottom - (scaled(value) / scaled(most)) * (bottom - 8);
    const x = (/** @type {number} */ bin) => FRAME.left + bin * barPx;
    context.font = font();
    context.textBaseline = "middle";
    context.textAlign = "right";
    const marks = this.log
      ? [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].filter((mark) => mark <= most)
      : levels(0, most, 4).filter((mark) => Number.isInteger(mark) && mark > 0);
    for (const mark of marks) {
      context.fillStyle = ink("--line");
      context.fillRect(FRAME.left, Math.round(y(mark)), plot, 1);
      context.fillStyle = ink("--ink-soft");
      context.fillText(count(mark), FRAME.left - 6, y(mark));
    }
    const inks = parts.length > 1 ? ["--line-strong", "--probe-0", "--probe-1"] : ["--accent"];
    sums.forEach((sum, bin) => {
      if (!sum) return;
      let below = 0;
      parts.forEach((counts, part) => {
        if (!counts[bin]) return;
        const [top, foot] = [y(below + counts[bin]), y(below)];
        // A bin with one score among thousands can still be seen.
        const height = Math.max(foot - top, 1);
        context.globalAlpha = bin > edge ? 1 : 0.55;
        context.fillStyle = ink(inks[part]);
        context.fillRect(x(bin), foot - height, Math.max(1, barPx - (barPx > 4 ? 1 : 0)), height);
        if (part === 2) {
          context.fillStyle = pattern(context, "stripes", ink("--panel"));
          context.fillRect(x(bin), foot - height, Math.max(1, barPx), height);
        }
        context.globalAlpha = 1;
        below += counts[bin];
      });
    });
    context.fillStyle = ink("--line-strong");
    context.fillRect(FRAME.left, bottom, plot, 1);
    context.textAlign = "center";
    const at = (/** @type {number} */ score) => x(1) + ((score - edges[0]) / (edges[bins] - edges[0])) * bins * barPx;
    for (const level of levels(edges[0], edges[bins], Math.max(2, Math.floor(plot / 80)))) {
      context.fillStyle = ink("--ink-soft");
      context.fillRect(Math.round(at(level)), bottom, 1, 4);
      context.fillText(number(level), at(level), bottom + 12);
    }
    context.strokeStyle = ink("--ink-soft");
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(x(given + 1), 0);
    context.lineTo(x(given + 1), bottom);
    context.stroke();
    context.setLineDash([]);
    for (const line of this.lines) line.style.transform = `translateX(${x(edge + 1)}px)`;
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {number} width
   * @param {[number, number][]} counts
   * @param {number} length
   */
  drawRate(canvas, width, counts, length) {
    if (width <= FRAME.left + FRAME.right) return;
    const values = shares(counts);
    drawCurve(canvas, {
      width,
      height: RATE_PX,
      left: FRAME.left,
      right: FRAME.right,
      pad: 8,
      from: 0,
      to: length,
      low: 0,
      high: Math.max(1, ...values.map((value) => value ?? 0)),
      columns: values.map((_, i) => length - values.length + i),
      values,
      colour: "--accent",
      show: (value) => `${number(value)} %`,
    });
  }

  /**
   * @param {PointerEvent} event
   * @param {HTMLElement} line
   */
  drag(event, line) {
    const { shown } = this;
    if (event.button !== 0 || !shown) return;
    event.preventDefault();
    this.lines[0].focus();
    line.setPointerCapture(event.pointerId);
    const hist = /** @type {HTMLElement} */ (line.parentElement);
    const move = (/** @type {PointerEvent} */ moved) => {
      const { left, width } = hist.getBoundingClientRect();
      const bars = shown.edges.length + 1;
      const bar = ((moved.clientX - left - FRAME.left) / (width - FRAME.left - FRAME.right)) * bars;
      this.move(Math.max(0, Math.min(shown.edges.length - 1, Math.round(bar) - 1)));
    };
    line.addEventListener("pointermove", move);
    line.addEventListener("lostpointercapture", () => line.removeEventListener("pointermove", move), { once: true });
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const { shown } = this;
    if (!shown || event.altKey || event.ctrlKey || event.metaKey) return;
    const ways = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    const way = ways[/** @type {keyof ways} */ (event.key)];
    if (way) this.move(Math.max(0, this.edgeOf(shown).edge + way));
    else if (event.key === "Home" || event.key === "Delete") this.move(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Return the pictures that can be saved. */
  pictures() {
    const { shown } = this;
    if (!shown) return [];
    const threshold = number(shown.edges[this.edgeOf(shown).edge]);
    const facts = [
      `${visible(shown.probe)} at ${shown.site}, engine ${visible(shown.engine)}, threshold ${threshold}`,
      "By token, by finished request, fired in the last 120 seconds and 60 minutes",
    ];
    const bands = () => this.canvases.map((canvas) => band(canvas));
    return [{ name: "Histograms", picture: () => compose(Math.max(...this.widths), "Population", facts, bands()) }];
  }
}
