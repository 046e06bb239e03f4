// @ts-check
// Ratio: how much a vector or a module does: as the slider has it, as it is sent, and in words. Pure.

/**
 * @typedef {"add" | "remove" | "gain"} Way add a vector, remove its direction, or scale a module
 * @typedef {{low: number, high: number, still: number}} Bounds in percent; `still` changes nothing
 */

/**
 * Return what the slider may show.
 * @param {Way} way
 * @param {number} ratioMax of the stream's norm, as the server bounds it
 * @returns {Bounds}
 */
export function bounds(way, ratioMax) {
  // 0.29 * 100 is 28.999…
  const most = Math.floor(ratioMax * 100 + 1e-9);
  if (way === "add") return { low: -most, high: most, still: 0 };
  return { low: 0, high: 100, still: way === "gain" ? 100 : 0 };
}

/**
 * Return the nearest percentage that the slider may show.
 * @param {number} percent
 * @param {Bounds} bounds
 */
export function within(percent, { low, high, still }) {
  return Number.isFinite(percent) ? Math.min(high, Math.max(low, Math.round(percent))) : still;
}

/**
 * Return the ratio to send.
 * @param {number} percent
 */
export function ratioOf(percent) {
  return Math.round(percent) / 100;
}

/**
 * Return how much is done, and where.
 * @param {Way} way
 * @param {number} percent
 * @param {string} site of the vector
 */
export function amount(way, percent, site) {
  if (way === "gain") return `${percent} % of the module's strength`;
  if (way === "remove") return `${percent} % of the direction removed at ${site}`;
  return `${signed(percent)} % of the stream's norm at ${site}`;
}

/**
 * Return what is done in three words: calm +25 %, calm removed by 50 %, glad at 50 %.
 * @param {Way} way
 * @param {string} name
 * @param {number} percent
 */
export function short(way, name, percent) {
  if (way === "gain") return `${name} at ${percent} %`;
  if (way === "remove") return `${name} removed by ${percent} %`;
  return `${name} ${percent > 0 ? "+" : ""}${signed(percent)} %`;
}

/** @param {number} percent */
function signed(percent) {
  return String(percent).replace("-", "−");
}
