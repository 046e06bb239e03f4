// @ts-check
// Protocol: the messages of the server, and how a binary message is read. It keeps nothing.

/** The value of a token without a row. NaN and +Infinity are values of rows that hold such numbers. */
export const MISSING = -Infinity;
export const VERSION = 1;

/**
 * @typedef {{name: string, site: string, threshold: number, pool: string}} Probe
 * @typedef {{name: string, model: string, num_layers: number, hidden_size: number, dtype: string, gone: boolean,
 *   problems: string[], sites: string[], probes: Probe[]}} Engine
 * @typedef {[number | null, number | null, number | null, number | boolean | null]} ProbeSummary max, mean, last, fired
 * @typedef {{key: number, id: string, engine: string, status: string, prompt_length: number, tokens: number,
 *   started_s: number | null, ended_s: number | null, rows_lost: number, steered: number, text: string,
 *   probes: ProbeSummary[]}} RequestSummary
 * @typedef {{site: string, hook: string, layer: number, probe: string, threshold: number, pool: string}} Series
 * @typedef {{tokens: number, median: (number | null)[], spread: (number | null)[], low: (number | null)[],
 *   high: (number | null)[]}} Baseline
 * @typedef {{id: string, kind: string, by: string | null, sites: string[] | null, step: number | null,
 *   position: number | null, time_s: number | null, label: string | null, scale: number | null,
 *   score: number | null, threshold: number | null, target: string | null, outcome: string | null,
 *   reason: string | null}} SteeringEvent
 * @typedef {{key: number, base: number, first: number, count: number, ids: number[], texts: (string | null)[],
 *   steered: number[], fresh: boolean, series?: Series[], baseline?: Baseline | null,
 *   events?: SteeringEvent[]}} DetailNews
 * @typedef {DetailNews & {at: number}} OtherNews at: where its numbers begin
 * @typedef {{engine: string, probe: string, site: string, pool: string, threshold: number, fixed: boolean,
 *   edges: number[], tokens: number[], requests: number[][], odd: number, labels: number,
 *   seconds: [number, number][], minutes: [number, number][]}} Population
 * @typedef {{t: number, state: "live" | "stale" | "ended", silent_s: number, lag_s: number | null,
 *   skipped_rows: number}} Heartbeat
 * @typedef {{vectors: {name: string, site: string}[], modules: string[], ratio_max: number, lease_s: number,
 *   lease_positions: number}} Offer what a page may steer with
 * @typedef {{version: number, capflow: string, rights: string[], steering?: Offer | null,
 *   source?: {kind: string, name: string}, requests_max: number, tokens_max: number, exports?: string[],
 *   lens?: boolean, lens_title?: string, stored?: boolean, alerts?: import("./alertbar.js").AlertRule[],
 *   again?: {server: string, tokens_max: number, temperature_max: number} | null}} Hello
 * @typedef {{id: number, state: "applied" | "rejected" | "unknown" | "waiting", step?: number | null,
 *   position?: number | null, reason?: string}} Ack
 * @typedef {{request: number, kind: "steer" | "gain", name: string, mode: "add" | "remove", ratio: number,
 *   page: string}} Held what a page holds on a request; on all with 0
 * @typedef {{layer: number, site: string, tokens: [number, string | null, number][]}} LensLayer
 * @typedef {{id: number, request: number, position: number, layers: LensLayer[], error: string}} LensAnswer
 * @typedef {{request: string, pieces: [number[], string][], over: boolean, finish: string | null,
 *   error: string}} AgainSide
 * @typedef {{id: number, error?: string, label?: string, plain?: AgainSide, steered?: AgainSide}} AgainNews
 * @typedef {{open: number, done: number, not_kept: number, dropped: Record<string, number>, tokens: number,
 *   rows: number, bytes: number}} Counts
 * @typedef {{last: number, tokens: number[], rows: number[], bytes: number[]}} RatesNews
 * @typedef {{hello?: Hello, heartbeat?: Heartbeat, seq?: number, engines?: Engine[], counts?: Counts,
 *   rates?: RatesNews, requests?: (Partial<RequestSummary> & {key: number})[],
 *   sparks?: Record<string, (number | null)[]>, gone?: number[], detail?: DetailNews, other?: OtherNews,
 *   population?: Population, health?: {status: any}, acks?: Ack[], steering?: {frozen: boolean, holds: Held[]},
 *   lens?: LensAnswer, stored?: import("./stored.js").StoredAnswer, alerts?: import("./alertbar.js").Alerts,
 *   again?: AgainNews}} Head
 * @typedef {{request: number, other: number, window: number[], probe: string, population: string,
 *   health: boolean, alerts: boolean}} Subscription
 */

/**
 * Return what the page may steer with; null without the right.
 * @param {Hello | null} hello
 */
export function offerOf(hello) {
  return hello?.rights.includes("steer") && hello.source?.kind !== "stored" ? (hello.steering ?? null) : null;
}

const reader = new TextDecoder();

/**
 * Return the head and the numbers of a binary message: uint32 length of the head, JSON, float32 numbers.
 * @param {ArrayBuffer} buffer
 * @returns {{head: Head, numbers: Float32Array}}
 */
export function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(reader.decode(new Uint8Array(buffer, 4, length)));
  return { head, numbers: new Float32Array(buffer, 4 + length) };
}
