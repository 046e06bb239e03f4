// @ts-check
// Format: numbers, times, sizes and names as text.

import { MISSING } from "./protocol.js";

const grouped = new Intl.NumberFormat("en");
const clocks = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const dates = new Intl.DateTimeFormat([], { dateStyle: "short", timeStyle: "short", hour12: false });
const SAME_DAY_MS = 20 * 3600 * 1000;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
// Characters that show nothing, or that change how their neighbours are shown.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]/gu;

/**
 * Return a captured value as text.
 * @param {number} value
 */
export function show(value) {
  if (value === MISSING) return "no row";
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "infinite";
  return number(value);
}

/**
 * Return a number with four digits and a real minus sign; a dash for null.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const far = size >= 1e6 || (size < 1e-3 && size > 0);
  return (far ? value.toExponential(2) : String(Number(value.toPrecision(4)))).replace("-", "−");
}

/** @param {number} value */
export function count(value) {
  return grouped.format(value);
}

/**
 * Return a count in five characters or fewer: 950, 9.1k, 2.4M.
 * @param {number} value
 */
export function short(value) {
  if (value < 1000) return String(Math.round(value));
  const [scale, unit] = value < 1e6 ? [1e3, "k"] : value < 1e9 ? [1e6, "M"] : [1e9, "G"];
  const scaled = value / scale;
  return `${scaled < 9.95 ? scaled.toFixed(1) : Math.round(scaled)}${unit}`;
}

/**
 * Return a number of bytes with its unit.
 * @param {number} bytes
 */
export function size(bytes) {
  let [value, unit] = [bytes, 0];
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

/**
 * Return a duration: 40 ms, 3.2 s, 4 min 10 s, 2 h 5 min.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/**
 * Return the time of day of seconds since 1970, with the date if it is another day; a dash for null.
 * @param {number | null} seconds
 */
export function clock(seconds) {
  if (seconds === null) return "–";
  if (Math.abs(Date.now() - seconds * 1000) > SAME_DAY_MS) return dates.format(seconds * 1000);
  return clocks.format(seconds * 1000);
}

/**
 * Return a number of things with the noun in the right form.
 * @param {number} amount
 * @param {string} one
 * @param {string} many
 */
export function plural(amount, one, many = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}

/**
 * Return the name of a model: of a path in the cache of Hugging Face `org/name`, of another path its last part.
 * @param {string} path
 */
export function modelName(path) {
  const cached = /models--([^/]+?)--([^/]+)/.exec(path);
  if (cached) return `${cached[1]}/${cached[2]}`;
  if (!/^[/~.]|^[A-Za-z]:\\/.test(path)) return path;
  return path.split(/[\\/]/).findLast((part) => part && part !== "." && part !== "..") ?? path;
}

/**
 * Return a name in which characters that show nothing stand as their code points.
 * @param {string} name
 */
export function visible(name) {
  const shown = name.replace(HIDDEN, (sign) => {
    const point = /** @type {number} */ (sign.codePointAt(0));
    return `‹${point.toString(16).toUpperCase().padStart(4, "0")}›`;
  });
  return shown.trim() ? shown : `“${shown}”`;
}

/**
 * Return what is shown of a token: its text, `#` and its id if the text shows nothing, a dot without either.
 * @param {string | null | undefined} text
 * @param {number} id
 */
export function tokenText(text, id) {
  if (text && /[^\p{Cf}]/u.test(text)) return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  return id >= 0 ? `#${id}` : "·";
}
