// @ts-check
// Filter: the language that chooses requests: `probe:code>2 status:live steered:yes "two words"`. Pure.
//
// All terms must hold. A term with a minus sign in front must not. Bare words are looked for in text and id.

/** @typedef {import("./protocol.js").RequestSummary} RequestSummary */
/** @typedef {{number: (request: RequestSummary, probe: string) => import("./protocol.js").ProbeSummary | null}}
  Probes */
/** @typedef {(request: RequestSummary, haystack: string, probes: Probes) => boolean} Test */
/** @typedef {{test: Test, errors: string[], empty: boolean}} Filter */

const STATUSES = ["live", "done", "stop", "length", "abort", "error"];
const NUMBERS = {
  tokens: (/** @type {RequestSummary} */ request) => request.tokens,
  prompt: (/** @type {RequestSummary} */ request) => request.prompt_length,
  lost: (/** @type {RequestSummary} */ request) => request.rows_lost,
  steered: (/** @type {RequestSummary} */ request) => request.steered,
};
const FIELDS = ["probe", "mean", "last", "fired", "status", "engine", "id", "text", ...Object.keys(NUMBERS)];
const TERM = /(-?)(?:([a-z]+):)?("(?:[^"\\]|\\.)*"?|[^\s"]+(?:"[^"]*"?)?)/gu;
const COMPARED = /^(.*?)(>=|<=|>|<|=)(.+)$/u;

/**
 * Return the filter of a query. A term that is not understood is an error and chooses everything.
 * @param {string} query
 * @returns {Filter}
 */
export function parse(query) {
  /** @type {Test[]} */ const tests = [];
  /** @type {string[]} */ const errors = [];
  for (const [source, minus, field, word] of query.matchAll(TERM)) {
    const test = term(field, unquoted(word), source);
    if (typeof test === "string") errors.push(test);
    else tests.push(minus ? (...given) => !test(...given) : test);
  }
  return {
    test: (request, haystack, probes) => tests.every((test) => test(request, haystack, probes)),
    errors,
    empty: tests.length === 0,
  };
}

/**
 * Return the text in which bare words are looked for.
 * @param {RequestSummary} request
 */
export function haystack(request) {
  return `${request.text}\n${request.id}`.toLowerCase();
}

/** @param {string} word */
function unquoted(word) {
  if (!word.startsWith('"')) return word.replaceAll('"', "");
  return word.replace(/^"|(?<!\\)"$/g, "").replace(/\\(.)/g, "$1");
}

/**
 * @param {string | undefined} field
 * @param {string} word
 * @param {string} source
 * @returns {Test | string}
 */
function term(field, word, source) {
  const lower = word.toLowerCase();
  if (!field) return (_, text) => text.includes(lower);
  if (field === "text") return (request) => request.text.toLowerCase().includes(lower);
  if (field === "id") return (request) => request.id.toLowerCase().includes(lower);
  if (field === "engine") return (request) => request.engine.toLowerCase().includes(lower);
  if (field === "status") {
    if (!STATUSES.includes(lower)) return `${source}: got ${word}, expected ${STATUSES.join(", ")}`;
    return (request) => (lower === "done" ? request.status !== "live" : request.status === lower);
  }
  if (field === "probe" || field === "mean" || field === "last" || field === "fired")
    return ofProbe(field, word, source);
  if (!(field in NUMBERS)) return `${source}: got the field ${field}, expected ${FIELDS.join(", ")}`;
  const read = NUMBERS[/** @type {keyof NUMBERS} */ (field)];
  if (lower === "yes" || lower === "no") return (request) => read(request) > 0 === (lower === "yes");
  const compare = comparison(/^[<>=]/.test(word) ? word : `=${word}`);
  if (!compare || compare.name) return `${source}: got ${word}, expected yes, no or a comparison such as >10`;
  return (request) => compare.holds(read(request));
}

/**
 * @param {"probe" | "mean" | "last" | "fired"} field
 * @param {string} word
 * @param {string} source
 * @returns {Test | string}
 */
function ofProbe(field, word, source) {
  const at = { probe: 0, mean: 1, last: 2, fired: 3 }[field];
  const compare = comparison(word);
  if (!compare && field !== "fired") return `${source}: got ${word}, expected a comparison such as ${field}:code>2`;
  const name = compare ? compare.name : word;
  return (request, _, probes) => {
    const score = probes.number(request, name)?.[at];
    if (score === null || score === undefined) return false;
    return compare ? compare.holds(Number(score)) : Number(score) > 0;
  };
}

/** @param {string} word */
function comparison(word) {
  const match = COMPARED.exec(word);
  const limit = match ? Number(match[3].replace("−", "-")) : NaN;
  if (!match || Number.isNaN(limit)) return null;
  const holds = {
    ">": (/** @type {number} */ value) => value > limit,
    "<": (/** @type {number} */ value) => value < limit,
    ">=": (/** @type {number} */ value) => value >= limit,
    "<=": (/** @type {number} */ value) => value <= limit,
    "=": (/** @type {number} */ value) => value === limit,
  }[match[2]];
  return holds ? { name: match[1], holds } : null;
}
