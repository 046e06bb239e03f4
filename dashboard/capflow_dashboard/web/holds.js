// @ts-check
// Holds: what pages hold on requests, as the server lists it. Pure.

import { plural, visible } from "./format.js";
import { short } from "./ratio.js";

/** @typedef {import("./protocol.js").Held} Held */

/**
 * Return how a hold acts.
 * @param {Held} hold
 * @returns {import("./ratio.js").Way}
 */
export function wayOf(hold) {
  return hold.kind === "gain" ? "gain" : hold.mode;
}

/**
 * Return what is held on a request. What is held on all requests gives way to its own.
 * @param {Held[]} holds
 * @param {number} key
 * @param {boolean} live whether the request runs
 */
export function holdsOf(holds, key, live) {
  const own = holds.filter((hold) => hold.request === key);
  if (!live) return own;
  const same = (/** @type {Held} */ a, /** @type {Held} */ b) =>
    a.kind === b.kind && (a.kind === "steer" || a.name === b.name);
  return [...own, ...holds.filter((hold) => !hold.request && !own.some((other) => same(other, hold)))];
}

/**
 * Return a hold in words: calm +25 %, by this page.
 * @param {Held} hold
 * @param {string} page the name of this page
 */
export function holdText(hold, page) {
  const everywhere = hold.request ? "" : " on all requests";
  return `${holdShort(hold)}${everywhere}, by ${hold.page === page ? "this page" : "another page"}`;
}

/** @param {Held} hold */
export function holdShort(hold) {
  return short(wayOf(hold), visible(hold.name), Math.round(hold.ratio * 100));
}

/**
 * Return how much is held, and how much of it by this page.
 * @param {Held[]} holds
 * @param {string} page the name of this page
 */
export function heldCount(holds, page) {
  if (!holds.length) return "nothing held";
  const own = holds.filter((hold) => hold.page === page).length;
  return `${plural(holds.length, "held", "held")}, ${own} by this page`;
}
