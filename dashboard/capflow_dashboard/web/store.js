// @ts-check
// Store: all that the server has sent over one connection, merged. It draws nothing and asks for nothing.

import { Detail } from "./detail.js";
import { haystack } from "./filter.js";

/** @typedef {import("./protocol.js").Head} Head */
/** @typedef {import("./protocol.js").RequestSummary} RequestSummary */
/** @typedef {import("./protocol.js").Engine} Engine */

const RATES_S = 120;
const CHANGES_MAX = 100;

export class Store {
  constructor() {
    /** @type {import("./protocol.js").Hello | null} */
    this.hello = null;
    /** @type {import("./protocol.js").Heartbeat | null} */
    this.heartbeat = null;
    /** @type {Engine[]} */
    this.engines = [];
    /** @type {import("./protocol.js").Counts | null} */
    this.counts = null;
    this.rates = { last: 0, tokens: [0].slice(1), rows: [0].slice(1), bytes: [0].slice(1) };
    /** By key, oldest first. @type {Map<number, RequestSummary>} */
    this.requests = new Map();
    /** The text in which words are looked for, by key. @type {Map<number, string>} */
    this.haystacks = new Map();
    /** @type {Map<number, (number | null)[]>} */
    this.sparks = new Map();
    /** The tokens of the request that was last subscribed to; the page may show another one already, and return to it
     * without a new subscription. @type {Detail | null} */
    this.detail = null;
    /** The tokens of the request that it is compared with. @type {Detail | null} */
    this.other = null;
    /** @type {import("./protocol.js").Population | null} */
    this.population = null;
    /** What all pages hold. @type {{frozen: boolean, holds: import("./protocol.js").Held[]} | null} */
    this.steering = null;
    /** The states of rules, and the latest changes, oldest first. @type {import("./alertbar.js").Alerts} */
    this.alerts = { states: [], changes: [] };
    /** @type {any} */
    this.status = null;
  }

  /**
   * Merge a message; return the names of what changed.
   * @param {Head} head
   * @param {Float32Array} numbers
   */
  take(head, numbers) {
    /** @type {Set<string>} */ const changed = new Set();
    for (const name of /** @type {const} */ (["hello", "heartbeat", "engines", "counts", "steering"])) {
      if (!head[name]) continue;
      Object.assign(this, { [name]: head[name] });
      changed.add(name);
    }
    if (head.rates) {
      this.rates.last = head.rates.last;
      for (const name of /** @type {const} */ (["tokens", "rows", "bytes"])) {
        this.rates[name] = [...this.rates[name], ...head.rates[name]].slice(-RATES_S);
      }
      changed.add("rates");
    }
    if (head.population) {
      this.population = head.population;
      changed.add("population");
    }
    if (head.alerts) {
      const { states, changes } = head.alerts;
      this.alerts = { states, changes: [...this.alerts.changes, ...changes].slice(-CHANGES_MAX) };
      changed.add("alerts");
    }
    if (head.health) {
      this.status = head.health.status;
      changed.add("health");
    }
    for (const key of head.gone ?? []) {
      this.requests.delete(key);
      this.haystacks.delete(key);
      this.sparks.delete(key);
    }
    for (const news of head.requests ?? []) this.takeRequest(news);
    for (const [key, spark] of Object.entries(head.sparks ?? {})) this.sparks.set(Number(key), spark);
    if (head.requests || head.gone || head.sparks) changed.add("requests");
    if (head.other) this.takeOther(head.other, numbers.subarray(head.other.at), changed);
    if (head.detail) this.takeDetail(head.detail, numbers, changed);
    else if (head.requests && this.detail) this.refer(changed);
    return changed;
  }

  /** @param {Partial<RequestSummary> & {key: number}} news */
  takeRequest(news) {
    const old = this.requests.get(news.key);
    if (old) {
      Object.assign(old, news);
    } else {
      this.requests.set(news.key, /** @type {RequestSummary} */ ({ ...EMPTY, ...news }));
    }
    if (!old || news.text !== undefined || news.id !== undefined) {
      this.haystacks.set(news.key, haystack(/** @type {RequestSummary} */ (this.requests.get(news.key))));
    }
  }

  /**
   * @param {import("./protocol.js").DetailNews} news
   * @param {Float32Array} numbers
   * @param {Set<string>} changed
   */
  takeDetail(news, numbers, changed) {
    const old = this.detail;
    if (news.fresh) {
      this.detail = new Detail(news);
      const same = old?.key === news.key && old.series.length === this.detail.series.length;
      // References outlive the rows that they were computed of.
      if (same && old.references.ready) this.detail.references = old.references;
      changed.add("fresh");
    }
    if (!this.detail || this.detail.key !== news.key || this.detail.base !== news.base) return;
    if (this.detail.take(news, numbers, this.facts(news.key))) changed.add("colours");
    changed.add("detail");
  }

  /**
   * @param {import("./protocol.js").OtherNews} news
   * @param {Float32Array} numbers
   * @param {Set<string>} changed
   */
  takeOther(news, numbers, changed) {
    if (news.fresh) this.other = new Detail(news);
    if (!this.other || this.other.key !== news.key || this.other.base !== news.base) return;
    this.other.take(news, numbers, this.facts(news.key));
    changed.add("other");
  }

  /** @param {Set<string>} changed */
  refer(changed) {
    if (this.detail?.refer(this.facts(this.detail.key))) changed.add("colours");
  }

  /** @param {number} key */
  facts(key) {
    const request = this.requests.get(key);
    return { promptLength: request?.prompt_length ?? 0, ended: request ? request.status !== "live" : false };
  }

  /** @param {string} name */
  engine(name) {
    return this.engines.find((engine) => engine.name === name);
  }

  /** The names of all probes of all engines, those of the first engine first. */
  get probeNames() {
    return [...new Set(this.engines.flatMap((engine) => engine.probes.map((probe) => probe.name)))];
  }

  /**
   * Return the numbers of a probe over a request: max, mean, last, fired.
   * @param {RequestSummary} request
   * @param {string} probe
   */
  number(request, probe) {
    const at = this.engine(request.engine)?.probes.findIndex((one) => one.name === probe) ?? -1;
    return at < 0 ? null : (request.probes[at] ?? null);
  }

  /** The key of the newest running request, or of the newest; 0 if there is none. */
  get newest() {
    let [newest, live] = [0, 0];
    for (const [key, request] of this.requests) {
      if (key > newest) newest = key;
      if (request.status === "live" && key > live) live = key;
    }
    return live || newest;
  }

  /**
   * Return the key of the newest request with an id; 0 if there is none.
   * @param {string} engine
   * @param {string} id
   */
  find(engine, id) {
    let newest = 0;
    for (const [key, request] of this.requests) {
      if (request.id === id && request.engine === engine && key > newest) newest = key;
    }
    return newest;
  }
}

const EMPTY = {
  id: "",
  engine: "",
  status: "live",
  prompt_length: 0,
  tokens: 0,
  started_s: 0,
  ended_s: null,
  rows_lost: 0,
  steered: 0,
  text: "",
  probes: [],
};
