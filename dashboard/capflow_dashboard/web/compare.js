// @ts-check
// Compare: two requests beside each other: their texts, where they first differ, and by how much their norms and
// scores do.

import { alignment, columnAt, difference, differences, firstDifference, pairs, same } from "./aligned.js";
import { envelope } from "./bins.js";
import { count, number, plural, show, tokenText, visible } from "./format.js";
import { Heatmap } from "./heatmap.js";
import { ink } from "./inks.js";
import { html, nothing, render } from "./lit.js";
import { seriesLabel, seriesName, statusOf } from "./page.js";
import { band, compose, legendBand } from "./picture.js";
import { legend } from "./plots.js";
import { Scale, Z_REACH } from "./scale.js";
import { Span } from "./span.js";
import { drawCurve } from "./strip.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {import("./detail.js").Detail} Detail */
/** @typedef {import("./aligned.js").Alignment} Alignment */

/** Steps whose tokens have elements. */
const STEPS_SHOWN = 800;
/** Requests to choose from. */
const CHOICES_MAX = 200;
const CURVE_PX = 64;
const SIDES = /** @type {const} */ ([0, 1]);
const NAMES = ["A", "B"];
const REFERENCE = { median: 0, spread: 1, low: -Z_REACH, high: Z_REACH, rows: 1 };

export class CompareView {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.box = box;
    this.page = page;
    box.setAttribute("aria-labelledby", "compare-title");
    render(
      html`<div class="compare-head"></div>
        <div class="compare-texts">${SIDES.map(
          (side) => html`<div class="compare-side"><h3>${NAMES[side]}</h3><div class="text compare-text div"
            role="listbox" tabindex="0" aria-orientation="horizontal" 
            aria-label="Text ${NAMES[side]}, by token"></div></div>`,
        )}</div>
        <aside class="panel compare-panel" aria-label="Token" tabindex="0"></aside>
        <div class="compare-plots"><div class="compare-curves"></div>
          <div class="heat-head"></div>
          <div class="heat" role="slider" tabindex="0" aria-roledescription="heatmap" aria-orientation="horizontal"
            aria-label="Differences of norms, layers by tokens. Arrow keys move the cursor."></div>
          <output class="readout" aria-live="off"></output></div>`,
      box,
    );
    const find = (/** @type {string} */ name) => /** @type {HTMLElement} */ (box.querySelector(name));
    this.head = find(".compare-head");
    this.panel = find(".compare-panel");
    this.curves = find(".compare-curves");
    this.heatHead = find(".heat-head");
    this.readout = find(".readout");
    this.heatBox = find(".heat");
    this.texts = /** @type {HTMLElement[]} */ ([...box.querySelectorAll(".compare-text")]);
    this.frame = { left: 60, width: 0, right: 14 };
    /** The step of the cursor. @type {number | null} */
    this.step = null;
    this.marked = -1;
    /** The first step whose tokens have elements. */
    this.first = 0;
    this.shownOf = "";
    /** What is drawn. @type {ReturnType<CompareView["make"]>} */
    this.made = null;
    this.span = new Span();
    this.heatmap = new Heatmap(this.heatBox, /** @type {any} */ (this.board()), this.frame);
    new ResizeObserver(([entry]) => {
      const { width } = entry.contentRect;
      this.frame.left = width < 520 ? 44 : 60;
      this.frame.width = Math.max(0, width - this.frame.left - this.frame.right);
      page.frames.draw("extra");
    }).observe(find(".compare-plots"));
    box.addEventListener("keydown", (event) => this.onKey(event));
    for (const side of SIDES) {
      this.texts[side].addEventListener("click", (event) => {
        const step = event.target instanceof HTMLElement ? event.target.dataset.step : undefined;
        if (step !== undefined) this.go(Number(step));
      });
    }
    this.heatBox.addEventListener("click", (event) => {
      const { made, frame } = this;
      const part = (event.clientX - this.heatBox.getBoundingClientRect().left - frame.left) / frame.width;
      const row = this.heatmap.rowAt(event.clientY - this.heatBox.getBoundingClientRect().top);
      if (!made || part < 0 || part >= 1) return;
      if (row !== null) this.marked = row;
      this.go(made.aligned.from + Math.floor(part * this.span.width));
    });
  }

  /** Return what the heatmap reads: the differences, as the detail of one request. */
  board() {
    const view = this;
    return {
      frames: this.page.frames,
      span: this.span,
      get detail() {
        return view.made?.detail ?? null;
      },
      get column() {
        return view.column;
      },
      get cursor() {
        return view.column;
      },
      get layer() {
        return view.marked;
      },
      heat() {
        const rows = view.made?.norms ?? [];
        return { rows, scales: rows.map((row) => (view.made?.spreads[row] === null ? BARE : SCALE)) };
      },
      point(/** @type {number | null} */ column) {
        if (view.made && column !== null) view.go(view.made.aligned.from + column);
      },
      moveLayer(/** @type {number} */ by) {
        const rows = view.made?.norms ?? [];
        const at = rows.indexOf(view.marked) + by;
        if (rows[at] !== undefined) view.marked = rows[at];
        view.page.frames.draw("extra");
      },
      colourBy() {},
    };
  }

  /** The column of the cursor among the differences. */
  get column() {
    const { made, step } = this;
    if (!made || step === null) return null;
    return Math.max(0, Math.min(made.detail.count - 1, step - made.aligned.from));
  }

  /** Compute what is drawn, of both requests; null until both are there. */
  make() {
    const { page } = this;
    const [a, b] = [page.detail, page.other];
    if (!a || !b) return null;
    const prompts = /** @type {[number, number]} */ ([
      page.request?.prompt_length ?? 0,
      page.store.requests.get(page.otherKey)?.prompt_length ?? 0,
    ]);
    const aligned = alignment(a, b, prompts, page.place.align);
    const rows = pairs(a, b, seriesName);
    const spreads = rows.map(([row]) => spreadOf(a, row));
    const series = rows.map(([row]) => a.series[row]);
    const detail = {
      base: aligned.from,
      count: Math.max(0, aligned.to - aligned.from),
      series,
      values: rows.map((pair, i) => differences(a, b, pair, aligned, series[i].probe ? 1 : (spreads[i] ?? 1))),
    };
    return {
      a,
      b,
      aligned,
      rows,
      spreads,
      detail,
      norms: series.flatMap((one, row) => (one.probe ? [] : [row])),
      probes: series.flatMap((one, row) => (one.probe ? [row] : [])),
      first: firstDifference(a, b, aligned),
    };
  }

  draw() {
    const { page } = this;
    this.made = this.make();
    const { made } = this;
    this.drawHead();
    this.box.dataset.ready = made ? "yes" : "";
    if (!made) {
      for (const text of this.texts) text.replaceChildren();
      this.shownOf = "";
      render(nothing, this.panel);
      this.curves.replaceChildren();
      return;
    }
    if (!made.norms.includes(this.marked)) this.marked = made.norms.at(-1) ?? -1;
    this.span.grow(made.detail.count);
    const shown = `${page.key} ${page.otherKey} ${page.place.align}`;
    if (shown !== this.shownOf) {
      this.shownOf = shown;
      this.step = made.first.step;
      this.first = this.windowOf(this.step ?? made.aligned.from);
    }
    this.drawTexts();
    this.drawCurves();
    this.drawHeat();
    this.drawPanel();
  }

  /** @param {number} step */
  windowOf(step) {
    const { aligned } = /** @type {NonNullable<CompareView["made"]>} */ (this.made);
    const first = Math.min(step - STEPS_SHOWN / 4, aligned.to - STEPS_SHOWN);
    return Math.max(aligned.from, Math.floor(first));
  }

  /**
   * Put the cursor on a step, and show it.
   * @param {number} step
   */
  go(step) {
    const { made } = this;
    if (!made) return;
    this.step = Math.max(made.aligned.from, Math.min(made.aligned.to - 1, step));
    if (this.step < this.first || this.step >= this.first + STEPS_SHOWN) this.first = this.windowOf(this.step);
    this.page.frames.draw("extra");
    requestAnimationFrame(() => {
      for (const text of this.texts) text.querySelector(".at")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }

  drawHead() {
    const { page, made } = this;
    const { store } = page;
    const keys = [page.key, page.otherKey];
    const all = [...store.requests.keys()].reverse().slice(0, CHOICES_MAX);
    const chooser = (/** @type {0 | 1} */ side) => {
      const listed = [...new Set([keys[side], ...all])].filter((key) => store.requests.has(key));
      return html`<label class="field"><span>${NAMES[side]}</span><select id="compare-${NAMES[side].toLowerCase()}"
        @change=${(/** @type {any} */ event) => this.choose(side, Number(event.target.value))}>
        ${keys[side] ? nothing : html`<option value="0" selected>choose a request</option>`}${listed.map((key) => {
          const one = /** @type {import("./protocol.js").RequestSummary} */ (store.requests.get(key));
          const words = one.text.replace(/\s+/g, " ").trim().slice(0, 40);
          return html`<option value=${key} ?selected=${key === keys[side]}>${visible(one.id.slice(0, 60))} ·
            ${statusOf(one).word} · ${visible(words)}</option>`;
        })}</select></label>`;
    };
    const aligns = /** @type {const} */ ([
      ["start", "the start"],
      ["generated", "the first generated token"],
    ]);
    render(
      html`<div class="title"><button type="button" class="small" @click=${() => page.view("request")}>← Request A
        </button><h2 id="compare-title">Compare</h2></div>
        <div class="compare-tools">${SIDES.map(chooser)}
          <button type="button" class="small" id="compare-swap" @click=${() => page.compare(page.otherKey, page.key)}
            ?disabled=${!page.otherKey}>Swap</button>
          <label class="field"><span>Aligned from</span><select id="compare-align" @change=${(
            /** @type {any} */ event,
          ) => {
            page.go({ align: event.target.value });
            page.frames.draw("extra");
          }}>${aligns.map(
            ([value, name]) => html`<option value=${value} ?selected=${value === page.place.align}>${name}</option>`,
          )}</select></label></div>
        <p class="soft" id="compare-verdict">${made ? this.verdict() : this.waiting()}${
          made?.first.step === null || !made
            ? nothing
            : html` <button type="button" class="small" id="compare-first" title="First difference (n)" @click=${() =>
                this.go(Number(made.first.step))}>Show</button>`
        }</p>`,
      this.head,
    );
  }

  waiting() {
    const { page } = this;
    if (!page.key && page.place.id) return `A, ${visible(page.place.id)}, is not kept.`;
    if (!page.otherKey && page.place.id2) return `B, ${visible(page.place.id2)}, is not kept.`;
    return page.otherKey && page.key ? "Loading…" : "Choose two requests.";
  }

  verdict() {
    const { made, page } = this;
    if (!made) return "";
    const { step, same: equal } = made.first;
    const from = page.place.align === "generated" ? "generated token" : "token";
    if (step === null) return `${plural(equal, from)} the same; no difference where both have tokens.`;
    const [x, y] = this.columns(step);
    const text = (/** @type {Detail} */ one, /** @type {number} */ column) =>
      visible(tokenText(one.texts[column], one.ids[column]));
    return html`${equal ? `${plural(equal, from)} the same, then` : "Different at once:"} <b>A</b> has <bdi
      class="token-text">${text(made.a, x)}</bdi>
      at position ${count(made.a.base + x)} and <b>B</b> <bdi class="token-text">${text(made.b, y)}</bdi>
      at ${count(made.b.base + y)}.`;
  }

  /**
   * Return the columns of both requests at a step.
   * @param {number} step
   */
  columns(step) {
    const { a, b, aligned } = /** @type {NonNullable<CompareView["made"]>} */ (this.made);
    return [columnAt(a, step, aligned.offs[0]), columnAt(b, step, aligned.offs[1])];
  }

  drawTexts() {
    const { made, first } = this;
    if (!made) return;
    const end = Math.min(made.aligned.to, first + STEPS_SHOWN);
    const values = made.detail.values[this.marked];
    const known = made.spreads[this.marked] !== null;
    for (const side of SIDES) {
      const detail = side ? made.b : made.a;
      const more = (/** @type {number} */ step, /** @type {string} */ name) =>
        html`<button type="button" class="more" @click=${() => {
          this.first = Math.max(made.aligned.from, Math.min(step, made.aligned.to - STEPS_SHOWN));
          this.page.frames.draw("extra");
        }}>${name}</button>`;
      const tokens = [];
      for (let step = first; step < end; step++) {
        const column = columnAt(detail, step, made.aligned.offs[side]);
        if (column < 0) continue;
        const colour = known && values ? SCALE.step(values[step - made.aligned.from]) : -1;
        const equal = same(made.a, made.b, made.aligned, step);
        const kind = equal === false ? " differs" : equal === null ? " alone" : "";
        const name = `t${colour >= 0 ? ` c${colour}` : ""}${kind}${
          step === made.first.step ? " first" : ""
        }${step === this.step ? " at" : ""}`;
        const text = tokenText(detail.texts[column], detail.ids[column]);
        tokens.push(
          html`<span role="option" class=${name} data-step=${step}
            aria-selected=${step === this.step ? "true" : "false"}
            id="step-${NAMES[side]}${step}" aria-label=${text.trim() ? nothing : "space"}>${text}</span>`,
        );
      }
      const box = this.texts[side];
      render(
        html`${first > made.aligned.from ? more(first - STEPS_SHOWN, "Earlier tokens") : nothing}<div class="run"
          role="presentation">${tokens}</div>${end < made.aligned.to ? more(end, "Later tokens") : nothing}`,
        box,
      );
      const has = this.step !== null && this.columns(this.step)[side] >= 0;
      if (has) box.setAttribute("aria-activedescendant", `step-${NAMES[side]}${this.step}`);
      else box.removeAttribute("aria-activedescendant");
    }
  }

  drawCurves() {
    const { made, frame } = this;
    if (!made || frame.width <= 0) return;
    const { a, b, aligned, probes, rows } = made;
    while (this.curves.children.length > probes.length) this.curves.lastChild?.remove();
    while (this.curves.children.length < probes.length) {
      const box = document.createElement("div");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("aria-hidden", "true");
      const head = document.createElement("div");
      head.className = "track-head";
      box.append(head, canvas);
      this.curves.append(box);
    }
    probes.forEach((place, i) => {
      const box = /** @type {HTMLElement} */ (this.curves.children[i]);
      box.className = "track";
      box.dataset.place = String(i % 6);
      const one = made.detail.series[place];
      const values = SIDES.map((side) => {
        const detail = side ? b : a;
        const all = new Float32Array(made.detail.count).fill(-Infinity);
        for (let at = 0; at < all.length; at++) {
          const column = columnAt(detail, aligned.from + at, aligned.offs[side]);
          if (column >= 0) all[at] = detail.values[rows[place][side]][column];
        }
        return all;
      });
      const ranges = [a.ranges[rows[place][0]], b.ranges[rows[place][1]]];
      const least = Math.min(one.threshold, ...ranges.map(({ low }) => low));
      const most = Math.max(one.threshold, ...ranges.map(({ high }) => high));
      const pad = (most - least) * 0.06 || 1;
      const [low, high] = [least - pad, most + pad];
      const lines = values.map((all) =>
        envelope(all, this.span.from, this.span.to, Math.max(1, Math.floor(frame.width))),
      );
      drawCurve(/** @type {HTMLCanvasElement} */ (box.lastChild), {
        width: frame.left + frame.width + frame.right,
        height: CURVE_PX,
        left: frame.left,
        right: frame.right,
        pad: 4,
        from: this.span.from,
        to: this.span.to,
        low,
        high,
        ...lines[0],
        colour: `--probe-${i % 6}`,
        show: number,
        under(context, x) {
          const y = (/** @type {number} */ value) => 4 + ((high - value) / (high - low)) * (CURVE_PX - 8);
          context.strokeStyle = ink("--ink-soft");
          context.setLineDash([4, 3]);
          context.beginPath();
          let pen = false;
          lines[1].columns.forEach((column, at) => {
            const value = lines[1].values[at];
            if (value !== null) context[pen ? "lineTo" : "moveTo"](x(column), y(value));
            pen = value !== null;
          });
          context.stroke();
          context.setLineDash([]);
          context.fillStyle = ink("--line-strong");
          context.fillRect(x(-1e6), y(one.threshold), 2e9, 1);
        },
      });
      const finite = [...made.detail.values[place]].filter(Number.isFinite);
      const mean = finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null;
      render(
        html`<i class="swatch" aria-hidden="true"></i><bdi class="track-name">${visible(one.probe)}</bdi>
          <span class="soft track-site">${one.site}</span><span class="gap"></span>
          <span class="nowrap"><i class="line-key solid" aria-hidden="true"></i> A <i class="line-key dashed"
            aria-hidden="true"></i> B</span>
          <span class="nowrap">B − A, mean <b>${number(mean)}</b></span>`,
        /** @type {HTMLElement} */ (box.firstChild),
      );
    });
  }

  drawHeat() {
    const { made } = this;
    if (!made) return;
    const waits = made.norms.some((row) => made.spreads[row] === null);
    const site = made.detail.series[this.marked]?.site ?? "";
    render(
      html`<span><b>Norms, B − A</b> <span class="soft">${
        waits ? "no colours yet: A's reference waits for rows" : "in spreads of A's reference"
      }${site ? html`; texts by ${site}` : nothing}</span></span><span class="gap"></span>${legend(SCALE)}`,
      this.heatHead,
    );
    this.heatmap.draw();
    this.heatmap.drawCursor();
    this.readout.textContent = this.heatmap.readout();
  }

  drawPanel() {
    const { made, step } = this;
    if (!made || step === null) {
      render(
        html`<h3>Token</h3><p class="soft">Choose a token. <kbd>←</kbd> <kbd>→</kbd> move, <kbd>n</kbd> shows the
        first difference.</p>`,
        this.panel,
      );
      return;
    }
    const columns = this.columns(step);
    const details = [made.a, made.b];
    const cell = (/** @type {0 | 1} */ side, /** @type {number} */ row) =>
      columns[side] < 0 ? -Infinity : details[side].values[row][columns[side]];
    const row = (/** @type {number} */ place) => {
      const [x, y] = [cell(0, made.rows[place][0]), cell(1, made.rows[place][1])];
      return html`<tr aria-current=${place === this.marked ? "true" : nothing}><th scope="row">${visible(
        seriesLabel(made.detail.series[place]),
      )}</th><td>${show(x)}</td><td>${show(y)}</td><td>${show(difference(x, y, 1))}</td></tr>`;
    };
    const table = (/** @type {string} */ name, /** @type {number[]} */ places) =>
      places.length
        ? html`<table class="numbers"><thead><tr><th scope="col">${name}</th><th scope="col">A</th>
          <th scope="col">B</th><th scope="col">B − A</th></tr></thead><tbody>${places.map(row)}</tbody></table>`
        : nothing;
    render(
      html`<h3>Token</h3><dl class="pairs" id="compare-token">${SIDES.map(
        (side) =>
          html`<dt>${NAMES[side]}</dt><dd>${
            columns[side] < 0
              ? html`<span class="soft">none</span>`
              : html`<bdi class="token-text">${tokenText(
                  details[side].texts[columns[side]],
                  details[side].ids[columns[side]],
                )}</bdi> at ${count(details[side].base + columns[side])}`
          }</dd>`,
      )}</dl>${table("Probe", made.probes)}${table("Norm", [...made.norms].reverse())}`,
      this.panel,
    );
  }

  /**
   * @param {0 | 1} side
   * @param {number} key
   */
  choose(side, key) {
    const { page } = this;
    if (side) page.compare(page.key, key);
    else page.compare(key, page.otherKey);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { made, step } = this;
    if (!made || (event.target instanceof Element && event.target.matches("select, button, .heat"))) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity }[event.key];
    if (by !== undefined) this.go((step ?? made.aligned.from - 1) + by);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Show the first different token. Called for the key n. */
  next() {
    if (this.made?.first.step !== null && this.made) this.go(Number(this.made.first.step));
  }

  /** Return the pictures that can be saved. */
  pictures() {
    const { made, page, frame } = this;
    if (!made) return [];
    const title = `Requests A ${visible(page.place.id)} and B ${visible(page.place.id2)}`;
    return [
      {
        name: "Differences",
        picture: () =>
          compose(
            frame.left + frame.width + frame.right,
            title,
            [
              "Norms, B − A, in spreads of A's reference",
              `steps ${count(made.aligned.from)} to ${count(made.aligned.to - 1)}`,
            ],
            [
              ...[...this.curves.querySelectorAll("canvas")].map((canvas) => band(canvas)),
              band(this.heatmap.canvas),
              legendBand(true, number(-Z_REACH), number(Z_REACH)),
            ],
          ),
      },
    ];
  }
}

const SCALE = new Scale("probe", REFERENCE, -Z_REACH, Z_REACH);
/** Of a layer whose reference is not known yet. */
const BARE = new Scale("probe", null, -Z_REACH, Z_REACH);

/**
 * Return the spread of a series' reference; null until it is known.
 * @param {Detail} detail
 * @param {number} row
 */
function spreadOf(detail, row) {
  const reference = detail.references.all[row];
  return reference?.rows ? reference.spread : null;
}
