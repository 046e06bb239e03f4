// @ts-check
// Picture: what is shown as an image file. It is made of the page's own canvases and numbers; nothing is loaded.

import { count, number, tokenText, visible } from "./format.js";
import { font, ink, pattern, sized, theme } from "./inks.js";
import { colours } from "./palette.js";
import { ABSENT, ODD, TITLES } from "./scale.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {{height: number, draw: (context: CanvasRenderingContext2D, width: number) => void}} Band */

const PAD_PX = 16;
const TITLE_PX = 20;
const LINE_PX = 16;
const GAP_PX = 10;
const LEGEND_PX = 22;
const TEXT_PX = 960;
const TEXT_LINE_PX = 24;
/** Of the text; a canvas holds twice as many pixels on dense screens, and browsers allow 16,384. */
const TEXT_LINES_MAX = 320;

/**
 * Return an image of bands below one another, with a title and facts above them.
 * @param {number} width of the bands, px
 * @param {string} title
 * @param {string[]} facts
 * @param {Band[]} bands
 */
export function compose(width, title, facts, bands) {
  const canvas = document.createElement("canvas");
  const head = TITLE_PX + facts.length * LINE_PX + GAP_PX;
  const height = bands.reduce((sum, band) => sum + band.height + GAP_PX, head) + 2 * PAD_PX - GAP_PX;
  const context = sized(canvas, width + 2 * PAD_PX, height);
  context.fillStyle = ink("--panel");
  context.fillRect(0, 0, width + 2 * PAD_PX, height);
  context.translate(PAD_PX, PAD_PX);
  context.textBaseline = "middle";
  context.fillStyle = ink("--ink");
  context.font = font("650").replace("11px", "14px");
  context.fillText(clipped(context, title, width), 0, TITLE_PX / 2);
  context.fillStyle = ink("--ink-soft");
  context.font = font().replace("11px", "12px");
  facts.forEach((fact, i) => {
    context.fillText(clipped(context, fact, width), 0, TITLE_PX + (i + 0.5) * LINE_PX);
  });
  context.translate(0, head);
  for (const band of bands) {
    context.save();
    band.draw(context, width);
    context.restore();
    context.translate(0, band.height + GAP_PX);
  }
  return canvas;
}

/**
 * Save a canvas as a PNG file.
 * @param {HTMLCanvasElement} canvas
 * @param {string} name
 */
export async function savePicture(canvas, name) {
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (blob) save(blob, `${fileName(name)}.png`);
}

/**
 * Save a file.
 * @param {Blob} blob
 * @param {string} name
 */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/**
 * Return a text as the name of a file.
 * @param {string} text
 */
export function fileName(text) {
  return (
    text
      .replace(/[^A-Za-z0-9_.-]+/g, "_")
      .slice(0, 80)
      .replace(/^[._]+/, "") || "capflow"
  );
}

/**
 * Return a band that is a canvas of the page.
 * @param {HTMLCanvasElement} canvas
 * @param {(context: CanvasRenderingContext2D) => void} [over] draws above it
 * @returns {Band}
 */
export function band(canvas, over) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.width / ratio, canvas.height / ratio];
  return {
    height,
    draw(context) {
      context.drawImage(canvas, 0, 0, canvas.width, canvas.height, 0, 0, width, height);
      over?.(context);
    },
  };
}

/**
 * Return a band with the colours of a scale and its ends.
 * @param {boolean} diverging
 * @param {string} low
 * @param {string} high
 * @returns {Band}
 */
export function legendBand(diverging, low, high) {
  return {
    height: LEGEND_PX,
    draw(context) {
      const palette = colours(theme(), diverging);
      context.font = font();
      context.textBaseline = "middle";
      context.fillStyle = ink("--ink-soft");
      context.fillText(low, 0, LEGEND_PX / 2);
      const left = context.measureText(low).width + 8;
      palette.forEach((colour, step) => {
        context.fillStyle = colour.back;
        context.fillRect(left + 2 * step, 4, 2, LEGEND_PX - 8);
      });
      context.fillStyle = ink("--ink-soft");
      context.fillText(high, left + 2 * palette.length + 8, LEGEND_PX / 2);
    },
  };
}

/**
 * Return the facts of the shown request that stand above its images.
 * @param {Page} page
 */
function factsOf(page) {
  const { detail, request, span } = page;
  const engine = page.store.engine(request?.engine ?? "");
  if (!detail) return [];
  const last = detail.base + Math.min(span.to, detail.count) - 1;
  return [
    `${visible(engine?.model ?? "")} · engine ${visible(request?.engine ?? "")}`,
    `positions ${count(detail.base + span.from)} to ${count(last)} of ${count(detail.base + detail.count)}`,
  ];
}

/**
 * Return the heatmap of the shown request.
 * @param {Page} page
 * @param {import("./plots.js").Plots} plots
 */
export function heatPicture(page, plots) {
  const { scales } = page.heat();
  const { canvas } = plots.heatmap;
  const [scale] = scales;
  const name = scale.kind === "probe" ? "scores, each centred at its threshold" : TITLES[scale.kind];
  const ends = scale.kind === "probe" ? ["below", "above"] : [number(scale.low), number(scale.high)];
  return compose(
    canvas.width / (devicePixelRatio || 1),
    titleOf(page),
    [...factsOf(page), `Heatmap: ${name}`],
    [band(canvas), legendBand(scale.diverging, ends[0], ends[1])],
  );
}

/**
 * Return the score curves of the shown request.
 * @param {Page} page
 * @param {import("./plots.js").Plots} plots
 */
export function curvePicture(page, plots) {
  const { detail } = page;
  const { tracks } = plots.tracks;
  const { left, width, right } = plots.frame;
  const bands = tracks.flatMap((track) => {
    const one = detail?.series[track.row];
    const threshold = page.threshold(track.row);
    /** @type {Band} */
    const head = {
      height: LINE_PX,
      draw(context) {
        context.font = font("650").replace("11px", "12px");
        context.textBaseline = "middle";
        context.fillStyle = ink(track.ink);
        context.fillRect(left, LINE_PX / 2 - 1, 12, 3);
        context.fillStyle = ink("--ink");
        const text = `${visible(one?.probe ?? "")} at ${one?.site}, fires from ${number(threshold)}`;
        context.fillText(clipped(context, text, width - 20), left + 18, LINE_PX / 2);
      },
    };
    return [
      head,
      band(track.canvas, (context) => {
        const y = track.thresholdY();
        context.strokeStyle = ink("--ink-soft");
        context.setLineDash([5, 4]);
        context.beginPath();
        context.moveTo(left, y);
        context.lineTo(left + width, y);
        context.stroke();
      }),
    ];
  });
  return compose(left + width + right, titleOf(page), factsOf(page), bands);
}

/**
 * Return the text of the shown positions, coloured as on the page.
 * @param {Page} page
 */
export function textPicture(page) {
  const { detail, measured, span } = page;
  if (!detail || measured < 0) return null;
  const scale = page.scale(measured);
  const palette = colours(theme(), scale.diverging);
  const one = detail.series[measured];
  const values = detail.values[measured];
  const pen = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  const [plain, mono] = [
    font().replace("11px", "14.5px"),
    `12px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`,
  ];
  /** @type {{text: string, x: number, y: number, width: number, column: number}[]} */ const pieces = [];
  const end = Math.min(span.to, detail.count);
  let [x, line, column] = [0, 0, span.from];
  for (; column < end && line < TEXT_LINES_MAX; column++) {
    pen.font = detail.texts[column] ? plain : mono;
    for (const [i, part] of tokenText(detail.texts[column], detail.ids[column]).split("\n").entries()) {
      if (i) [x, line] = [0, line + 1];
      for (let rest = part; rest; ) {
        const fitting = fit(pen, rest, TEXT_PX - x, x === 0);
        if (fitting)
          pieces.push({ text: fitting, x, y: line * TEXT_LINE_PX, width: pen.measureText(fitting).width, column });
        x += fitting ? pen.measureText(fitting).width : 0;
        rest = rest.slice(fitting.length);
        if (rest) [x, line] = [0, line + 1];
      }
    }
  }
  const facts = [...factsOf(page), `${visible(one.probe || "norm")} at ${one.site}: ${TITLES[scale.kind]}`];
  if (column < end) facts.push(`cut after ${count(column - span.from)} tokens`);
  /** @type {Band} */
  const text = {
    height: (line + 1) * TEXT_LINE_PX,
    draw(context) {
      context.textBaseline = "middle";
      for (const piece of pieces) {
        const step = scale.step(values[piece.column]);
        const middle = piece.y + TEXT_LINE_PX / 2;
        context.fillStyle = step >= 0 ? palette[step].back : "transparent";
        if (step === ODD) context.fillStyle = pattern(context, "stripes", ink("--bad"));
        context.fillRect(piece.x, piece.y + 2, piece.width, TEXT_LINE_PX - 4);
        if (step === ABSENT) {
          context.strokeStyle = ink("--line-strong");
          context.setLineDash([1, 2]);
          context.strokeRect(piece.x + 0.5, piece.y + 2.5, Math.max(1, piece.width - 1), TEXT_LINE_PX - 5);
          context.setLineDash([]);
        }
        context.fillStyle = step >= 0 ? palette[step].fore : ink(step === ABSENT ? "--ink-soft" : "--ink");
        context.font = detail.texts[piece.column] ? plain : mono;
        context.fillText(piece.text, piece.x, middle);
        if (page.fires(measured, piece.column)) context.fillRect(piece.x, piece.y + TEXT_LINE_PX - 4, piece.width, 2);
        if (detail.steered[piece.column]) {
          context.fillStyle = ink("--steer");
          context.fillRect(piece.x, piece.y + 1, piece.width, 2);
        }
      }
    },
  };
  return compose(TEXT_PX, titleOf(page), facts, [
    text,
    legendBand(scale.diverging, number(scale.low), number(scale.high)),
  ]);
}

/** @param {Page} page */
function titleOf(page) {
  return `Request ${visible(page.request?.id ?? "")}`;
}

/**
 * Return as much of a text as fits; at least one character if it must.
 * @param {CanvasRenderingContext2D} pen
 * @param {string} text
 * @param {number} width
 * @param {boolean} must
 */
function fit(pen, text, width, must) {
  if (pen.measureText(text).width <= width) return text;
  const signs = [...text];
  // A token that fits on a line of its own is not broken.
  if (!must && pen.measureText(text).width <= TEXT_PX) return "";
  let [low, high] = [must ? 1 : 0, signs.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pen.measureText(signs.slice(0, middle).join("")).width <= width) low = middle;
    else high = middle - 1;
  }
  return signs.slice(0, Math.max(low, must ? 1 : 0)).join("");
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} width
 */
function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const signs = [...text.slice(0, 600)];
  while (signs.length && context.measureText(`${signs.join("")}…`).width > width) signs.pop();
  return `${signs.join("")}…`;
}
