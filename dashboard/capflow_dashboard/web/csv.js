// @ts-check
// Csv: the list of requests as a CSV file (RFC 4180), with the columns of `/api/requests.csv`. Pure.

/** @typedef {import("./store.js").Store} Store */

/** What spreadsheets take for the start of a formula, also in full width and behind spaces. */
const FORMULA = /^\s*[=+\-@\t\r\n＝＋－＠]/u;
const NUMBERS = ["max", "mean", "last", "fired"];
const TITLES = [
  "id",
  "engine",
  "status",
  "prompt_tokens",
  "tokens",
  "started",
  "ended",
  "lost_rows",
  "steered",
  "text",
];

/**
 * Return a text as a cell. One that a spreadsheet would take for a formula has a `'` before it.
 * @param {string} text
 */
export function cell(text) {
  const safe = FORMULA.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** @param {(string | number)[]} cells cells as `cell` returns them, and numbers */
function line(cells) {
  return `${cells.join(",")}\r\n`;
}

/** @param {unknown} value */
function numeral(value) {
  return typeof value === "number" ? String(value) : "";
}

/** @param {number | null} seconds */
function time(seconds) {
  return seconds === null ? "" : new Date(seconds * 1000).toISOString().replace("Z", "+00:00");
}

/**
 * Return the file of some requests, in their order.
 * @param {Pick<Store, "requests" | "probeNames" | "number">} store
 * @param {number[]} keys
 */
export function listCsv(store, keys) {
  const names = store.probeNames;
  const titles = [...TITLES, ...names.flatMap((name) => NUMBERS.map((number) => `${name} ${number}`))];
  const lines = [line(titles.map(cell))];
  for (const key of keys) {
    const one = store.requests.get(key);
    if (!one) continue;
    lines.push(
      line([
        ...[one.id, one.engine, one.status].map(cell),
        one.prompt_length,
        one.tokens,
        time(one.started_s),
        time(one.ended_s),
        one.rows_lost,
        one.steered,
        cell(one.text),
        ...names.flatMap((name) => (store.number(one, name) ?? NUMBERS).map(numeral)),
      ]),
    );
  }
  return lines.join("");
}
