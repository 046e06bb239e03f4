// @ts-check
// Order: which requests the list shows, in which order. Pure, but for the order that it holds.

import { parse } from "./filter.js";
import { nameOf } from "./place.js";

/** @typedef {import("./protocol.js").RequestSummary} RequestSummary */
/** @typedef {import("./store.js").Store} Store */

/** @type {Record<string, (request: RequestSummary, store: Store) => number | string>} */
const COLUMNS = {
  started: (request) => request.key,
  text: (request) => request.text.toLowerCase(),
  status: (request) => request.status,
  engine: (request) => request.engine,
  tokens: (request) => request.tokens,
  steered: (request) => request.steered,
  lost: (request) => request.rows_lost,
};

/**
 * Return the keys of the requests to show: pinned ones first, then by the sort.
 * @param {Store} store
 * @param {{q: string, sort: string, pins: string[]}} place
 * @returns {{keys: number[], errors: string[]}}
 */
export function ordered(store, { q, sort, pins }) {
  const filter = parse(q);
  const pinned = new Set(pins);
  const [above, below] = [[0].slice(1), [0].slice(1)];
  for (const [key, request] of store.requests) {
    if (pinned.size && pinned.has(nameOf(request.engine, request.id))) above.push(key);
    else if (filter.empty || filter.test(request, store.haystacks.get(key) ?? "", store)) below.push(key);
  }
  const compare = comparer(store, sort);
  return { keys: [...above.sort(compare), ...below.sort(compare)], errors: filter.errors };
}

/**
 * @param {Store} store
 * @param {string} sort
 * @returns {(a: number, b: number) => number}
 */
function comparer(store, sort) {
  const down = sort.startsWith("-");
  const name = sort.replace(/^-/, "");
  const sign = down ? -1 : 1;
  if (name === "started" || !(name in COLUMNS || name.includes(":"))) return (a, b) => sign * (a - b);
  /** @type {Map<number, number | string>} */ const values = new Map();
  const [part, probe] = [name.slice(0, name.indexOf(":")), name.slice(name.indexOf(":") + 1)];
  const at = { max: 0, mean: 1, last: 2, fired: 3 }[part] ?? 0;
  const read = COLUMNS[name] ?? ((request) => Number(store.number(request, probe)?.[at] ?? NaN));
  for (const [key, request] of store.requests) values.set(key, read(request, store));
  return (a, b) => {
    const [left, right] = [/** @type {any} */ (values.get(a)), /** @type {any} */ (values.get(b))];
    // Requests without a number come last, whichever way the others go.
    const [emptyLeft, emptyRight] = [Number.isNaN(left), Number.isNaN(right)];
    if (emptyLeft || emptyRight) return emptyLeft && emptyRight ? b - a : emptyLeft ? 1 : -1;
    return left < right ? -sign : left > right ? sign : b - a;
  };
}
