// @ts-check
// Palette: the 64 colours of a scale, for light and dark pages; as CSS classes for tokens and as pixels for canvases.
//
// Blue to orange and pale to deep: both keep their order for every kind of colour blindness.

import { STEPS } from "./scale.js";

/** @typedef {"light" | "dark"} Theme */
/** @typedef {{back: string, fore: string, pixel: number}} Colour pixel: as a number of an ImageData's Uint32Array */

const STOPS = {
  light: {
    sequential: ["#f3f6f4", "#cfe5dc", "#93cabf", "#4ea3a6", "#237389", "#1b4a6b", "#152a4a"],
    diverging: ["#1f5f9e", "#5d9ccb", "#b4d3e8", "#f5f5f2", "#f7cfa8", "#e08a4c", "#ac4713"],
  },
  dark: {
    sequential: ["#1a222b", "#1b3a50", "#1d5a72", "#2a7f8c", "#4fa89a", "#94cfa6", "#eef2bf"],
    diverging: ["#7cc0ff", "#3f82bd", "#25486a", "#20262e", "#5f3b22", "#b0672e", "#ffae66"],
  },
};

/** @param {string[]} stops @returns {Colour[]} */
function ramp(stops) {
  const points = stops.map((hex) => [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: STEPS }, (_, i) => {
    const at = (i / (STEPS - 1)) * (points.length - 1);
    const left = Math.min(Math.floor(at), points.length - 2);
    const [r, g, b] = points[left].map((v, c) => Math.round(v + (points[left + 1][c] - v) * (at - left)));
    const fore = luminance([r, g, b]) > 0.179 ? "#000000" : "#ffffff";
    return { back: `rgb(${r}, ${g}, ${b})`, fore, pixel: ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0 };
  });
}

/** @param {number[]} rgb */
function luminance(rgb) {
  const linear = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

const RAMPS = {
  light: { sequential: ramp(STOPS.light.sequential), diverging: ramp(STOPS.light.diverging) },
  dark: { sequential: ramp(STOPS.dark.sequential), diverging: ramp(STOPS.dark.diverging) },
};

/**
 * Return the 64 colours, lowest first.
 * @param {Theme} theme
 * @param {boolean} diverging
 */
export function colours(theme, diverging) {
  return RAMPS[theme][diverging ? "diverging" : "sequential"];
}

/** Return the style sheet with the class of each colour: `.div .c0` to `.seq .c63`. */
export function sheetText() {
  const lines = [];
  for (const [name, diverging] of /** @type {[string, boolean][]} */ ([
    ["seq", false],
    ["div", true],
  ])) {
    const [light, dark] = [colours("light", diverging), colours("dark", diverging)];
    for (let step = 0; step < STEPS; step++) {
      const back = `light-dark(${light[step].back}, ${dark[step].back})`;
      const fore = `light-dark(${light[step].fore}, ${dark[step].fore})`;
      lines.push(`.${name} .c${step} { background-color: ${back}; color: ${fore}; }`);
    }
    const stops = light.map((colour, step) => `light-dark(${colour.back}, ${dark[step].back})`);
    lines.push(`.bar.${name} { background-image: linear-gradient(to right, ${stops.join(", ")}); }`);
  }
  return lines.join("\n");
}
