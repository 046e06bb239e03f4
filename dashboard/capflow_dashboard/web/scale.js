// Scales: map values to colours, for the tokens and for the heatmap.
//
// A value is NaN or infinite if its row is, and -Infinity if there is no row. Medians, ranges and scales leave these
// values out.

const STEPS = 64;
const PALETTES = {
  light: {
    sequential: ["#f3f6f4", "#cfe5dc", "#93cabf", "#4ea3a6", "#237389", "#1b4a6b", "#152a4a"],
    diverging: ["#1f5f9e", "#5d9ccb", "#b4d3e8", "#f5f5f2", "#f7cfa8", "#e08a4c", "#ac4713"],
  },
  dark: {
    sequential: ["#1a222b", "#1b3a50", "#1d5a72", "#2a7f8c", "#4fa89a", "#94cfa6", "#eef2bf"],
    diverging: ["#7cc0ff", "#3f82bd", "#25486a", "#20262e", "#5f3b22", "#b0672e", "#ffae66"],
  },
};

export const MISSING = -Infinity;
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Call `call` whenever the colours of the page change. */
export function onTheme(call) {
  dark.addEventListener("change", call);
}

function quantile(sorted, q) {
  if (!sorted.length) return NaN;
  const at = q * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}

function finiteSorted(...arrays) {
  const all = new Float64Array(arrays.reduce((total, array) => total + array.length, 0));
  let count = 0;
  for (const array of arrays) for (const value of array) if (Number.isFinite(value)) all[count++] = value;
  return all.subarray(0, count).sort();
}

/**
 * Return the norms of one site on a scale: z, ratio, log or raw.
 * z is robust: (v - median) / (1.4826 · MAD), where MAD is the median absolute deviation.
 */
export function normalise(values, scale) {
  const result = new Float64Array(values.length);
  if (scale === "raw") return Float64Array.from(values);
  if (scale === "log") {
    for (let i = 0; i < values.length; i++) result[i] = values[i] === MISSING ? MISSING : Math.log10(values[i]);
    for (let i = 0; i < values.length; i++) if (values[i] === 0) result[i] = NaN;
    return result;
  }
  const sorted = finiteSorted(values);
  const median = quantile(sorted, 0.5);
  const spread = 1.4826 * quantile(sorted.map((value) => Math.abs(value - median)).sort(), 0.5);
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value === MISSING) result[i] = MISSING;
    else if (scale === "ratio") result[i] = value / median;
    else result[i] = spread > 0 ? (value - median) / spread : value - median;
  }
  return result;
}

/**
 * The range of a scale, and its colours. The range ends at most 1.5 interquartile ranges outside the quartiles, so that
 * one outlier, often the first token, does not take all the colours. Values outside the range have the end's colour.
 */
export class Scale {
  /**
   * centre: of a diverging scale; null for a sequential one.
   * reach: the distance from the centre to the ends; null to compute it from the values.
   */
  constructor(arrays, { centre = null, reach = null } = {}) {
    const diverging = centre !== null;
    const sorted = reach === null ? finiteSorted(...arrays) : new Float64Array(0);
    const [first, third] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
    let low = Math.max(sorted[0], first - 1.5 * (third - first));
    let high = Math.min(sorted.at(-1), third + 1.5 * (third - first));
    if (!sorted.length) [low, high] = [0, 1];
    if (diverging) {
      const far = reach ?? (Math.max(Math.abs(low - centre), Math.abs(high - centre)) || 1);
      [low, high] = [centre - far, centre + far];
    } else if (!(high > low)) {
      const pad = Math.abs(low) * 0.05 || 1;
      [low, high] = [low - pad, high + pad];
    }
    this.low = low;
    this.high = high;
    this.stops = PALETTES[dark.matches ? "dark" : "light"][diverging ? "diverging" : "sequential"];
    this.name = `${dark.matches}/${diverging}`;
    this.ramp = ramp(this.stops);
  }

  /** Return the step of a finite value, 0 to 63. */
  step(value) {
    const t = (value - this.low) / (this.high - this.low);
    return Math.round(Math.min(1, Math.max(0, t)) * (STEPS - 1));
  }

  /** The colours as a CSS gradient. */
  get gradient() {
    return `linear-gradient(to right, ${this.stops.join(", ")})`;
  }

  /** The colours as plotly's colorscale. */
  get colorscale() {
    return this.stops.map((colour, i) => [i / (this.stops.length - 1), colour]);
  }
}

const ramps = new Map();

/** Return 64 colours `{back, fore}`; fore is black or white, whichever is readable on back. */
function ramp(stops) {
  const name = stops.join();
  if (!ramps.has(name)) {
    const points = stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    ramps.set(
      name,
      Array.from({ length: STEPS }, (_, i) => {
        const at = (i / (STEPS - 1)) * (points.length - 1);
        const left = Math.min(Math.floor(at), points.length - 2);
        const rgb = points[left].map((v, c) => Math.round(v + (points[left + 1][c] - v) * (at - left)));
        const linear = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
        return { back: `rgb(${rgb.join(", ")})`, fore: luminance > 0.179 ? "#000000" : "#ffffff" };
      }),
    );
  }
  return ramps.get(name);
}

/** Return a value as text. */
export function show(value) {
  if (value === MISSING) return "no row";
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "infinite";
  const size = Math.abs(value);
  const far = size >= 1e6 || (size < 1e-3 && size > 0);
  return (far ? value.toExponential(2) : String(Number(value.toPrecision(4)))).replace("-", "−");
}
