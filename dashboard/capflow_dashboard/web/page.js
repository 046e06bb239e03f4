// @ts-check
// Page: what is shown, and the commands that change it. Views read it and draw; only these commands write it.

import { fires } from "./curve.js";
import { holdsOf } from "./holds.js";
import { nameOf, nowhere, read, write } from "./place.js";
import { commonScales, normScale, probeScale } from "./scale.js";
import { Span } from "./span.js";
import { Store } from "./store.js";

/** @typedef {import("./place.js").Place} Place */
/** @typedef {import("./frames.js").Frames} Frames */
/** @typedef {import("./scale.js").Scale} Scale */

/** How long the address may be behind what is shown. */
const ADDRESS_MS = 250;
/** The parts that the cursor is drawn in. */
const CURSOR = ["text-cursor", "plots-cursor", "token"];
/** The parts that colours are drawn in. */
const COLOURS = ["tools", "text", "plots", "token"];

export class Page {
  /** @param {Frames} frames */
  constructor(frames) {
    this.frames = frames;
    this.store = new Store();
    /** @type {Place} */
    this.place = nowhere();
    /** The key of the shown request; 0 for none. */
    this.key = 0;
    /** The key of the request that it is compared with; 0 for none. */
    this.otherKey = 0;
    /** The key of the request that was shown before it; 0 for none. */
    this.earlier = 0;
    this.span = new Span();
    /** Whether the span and the cursor of the address are restored. */
    this.restored = false;
    /** The column under the pointer. @type {number | null} */
    this.hover = null;
    /** The series of norms that is marked: the layer. */
    this.row = -1;
    /** Set while the address is behind the place. @type {ReturnType<typeof setTimeout> | undefined} */
    this.behind = undefined;
    /** The address that was written or read last, and when it was written. */
    this.address = "";
    this.settledAt = 0;
    /** @type {import("./feed.js").LinkState} */
    this.link = "connecting";
    this.why = "";
    this.now = Date.now();
    /** How many rules of alerts fire and are not muted. */
    this.alarms = 0;
    /** Called with what a screen reader shall say. @type {(text: string) => void} */
    this.announce = () => {};
    /** Called with results of actions, which a screen reader shall say too. @type {(text: string) => void} */
    this.say = () => {};
    /** What is steered; null until the page has its name. @type {import("./desk.js").Desk | null} */
    this.desk = null;
    /** @type {import("./lens.js").Lens | null} */
    this.lens = null;
    /** @type {import("./stored.js").Stored | null} */
    this.stored = null;
    /** The parts that could not be loaded, as the page calls them. @type {Set<string>} */
    this.missing = new Set();
    /** The sheet that runs a request again; null until it is first opened.
     * @type {import("./againsheet.js").AgainSheet | null} */
    this.again = null;
    /** Opens that sheet for the shown request. */
    this.runAgain = async () => {};
    /** Called when the subscription may have changed. */
    this.onSubscription = () => {};
  }

  // What is shown.

  /**
   * Return what pages hold on a request.
   * @param {import("./protocol.js").RequestSummary} request
   */
  held({ key, status }) {
    return this.desk ? holdsOf(this.desk.holds, key, status === "live") : [];
  }

  get request() {
    return this.store.requests.get(this.key);
  }

  get detail() {
    const { detail } = this.store;
    return detail?.key === this.key ? detail : null;
  }

  /** The tokens of the request that it is compared with. */
  get other() {
    const { other } = this.store;
    return other && other.key === this.otherKey ? other : null;
  }

  /** Whether requests may be run again. */
  get mayRun() {
    return Boolean(this.desk?.may && this.store.hello?.again);
  }

  /** The column of the cursor; null if it is not among the kept ones. */
  get cursor() {
    const { detail, place } = this;
    if (!detail || place.pos === null) return null;
    const column = place.pos - detail.base;
    return column >= 0 && column < detail.count ? column : null;
  }

  /** The column that is pointed at, or else the cursor's. */
  get column() {
    const { hover, detail } = this;
    return hover !== null && detail && hover < detail.count ? hover : this.cursor;
  }

  /** The probe of the list. */
  get probe() {
    const names = this.store.probeNames;
    return names.includes(this.place.probe) ? this.place.probe : (names[0] ?? "");
  }

  /** The engine and the probe whose population is shown. */
  get populated() {
    const { place, store, probe } = this;
    const engines = store.engines.filter((one) => one.probes.length);
    const engine = engines.find((one) => one.name === place.engine) ?? engines.find((one) => !one.gone) ?? engines[0];
    const named = engine?.probes.find((one) => one.name === probe) ?? engine?.probes[0];
    return { engine: engine?.name ?? "", probe: named?.name ?? "" };
  }

  /** Whether what is shown is old: silent, stale, lost or ended. */
  get state() {
    if (this.link !== "open") return this.link;
    const { heartbeat, hello } = this.store;
    if (hello?.source?.kind === "stored") return "stored";
    if (heartbeat?.state === "stale" || heartbeat?.state === "ended") return heartbeat.state;
    if (!heartbeat && !hello) return "connecting";
    return "live";
  }

  /** The index of the series that colours the tokens; -1 without one. */
  get measured() {
    const { detail, place } = this;
    if (!detail) return -1;
    const chosen = place.by ? detail.series.findIndex((one) => place.by === seriesName(one)) : -1;
    if (chosen >= 0) return chosen;
    const named = /^probe:([^@]*)$/.exec(place.by);
    const found = named ? detail.series.findIndex((one) => one.probe === named[1]) : -1;
    if (found >= 0) return found;
    // A probe that scores tokens says most; without one, the last layer.
    const probes = detail.probes;
    return probes.find((row) => detail.series[row].pool === "token") ?? probes[0] ?? detail.norms.at(-1) ?? -1;
  }

  /** The index of the marked series of norms. */
  get layer() {
    const { detail } = this;
    if (!detail) return -1;
    const { measured } = this;
    if (measured >= 0 && !detail.series[measured].probe) return measured;
    return detail.norms.includes(this.row) ? this.row : (detail.norms.at(-1) ?? -1);
  }

  /** @param {"request" | "baseline"} [ref] */
  references(ref = this.place.ref) {
    const { detail } = this;
    if (!detail) return [];
    return ref === "baseline" && detail.baseline ? detail.baseline : detail.references.all;
  }

  /**
   * Return the scale of one series, as the tokens are coloured.
   * @param {number} row
   * @returns {Scale}
   */
  scale(row) {
    const one = this.detail?.series[row];
    const reference = this.references()[row] ?? null;
    return one?.probe ? probeScale(one.threshold, reference) : normScale(this.place.scale, reference);
  }

  /** Return the rows of the heatmap, from the bottom, and the scale of each. */
  heat() {
    const { detail, place } = this;
    if (!detail) return { rows: [], scales: [] };
    if (place.heat === "probes" && detail.probes.length) {
      const rows = detail.probes;
      return { rows, scales: rows.map((row) => this.scale(row)) };
    }
    const rows = detail.norms;
    const change = place.heat === "change" && detail.baseline;
    const references = this.references(change ? "baseline" : place.ref);
    const kind = change ? "z" : place.scale;
    return {
      rows,
      scales: commonScales(
        kind,
        rows.map((row) => references[row] ?? null),
      ),
    };
  }

  /**
   * Return the threshold of a series: as moved, or that of its file.
   * @param {number} row
   */
  threshold(row) {
    const one = this.detail?.series[row];
    return one ? (this.place.thresholds.get(seriesName(one)) ?? one.threshold) : NaN;
  }

  /**
   * Return whether a token fires: only probes that score tokens do.
   * @param {number} row
   * @param {number} column
   */
  fires(row, column) {
    const { detail } = this;
    const one = detail?.series[row];
    if (!detail || !one?.probe || one.pool !== "token") return false;
    return fires(detail.values[row][column], this.threshold(row));
  }

  // Commands.

  /** Take the place from the address. */
  visit() {
    this.unschedule();
    this.address = location.hash;
    this.place = read(this.address);
    this.hover = null;
    this.resolve();
    this.frames.draw("shell", "list", "empty", "head", "fresh", ...COLOURS, ...CURSOR);
  }

  /**
   * Change the place, and the address with it: soon if it has just changed, because browsers refuse more than 20
   * changes a second. An entry is made at once.
   * @param {Partial<Place>} changes
   * @param {boolean} [entry] whether the browser's back button returns from it
   */
  go(changes, entry = false) {
    if (entry && this.behind !== undefined) this.settle();
    Object.assign(this.place, changes);
    // A clock that was set back does not hold it up.
    const wait = Math.min(ADDRESS_MS, this.settledAt + ADDRESS_MS - Date.now());
    if (entry || wait <= 0) this.settle(entry ? "pushState" : "replaceState");
    // If the address is another one by then, a visit is about to come.
    else this.behind ??= setTimeout(() => location.hash === this.address && this.settle(), wait);
  }

  /**
   * Let the address say the place.
   * @param {"pushState" | "replaceState"} [how]
   */
  settle(how = "replaceState") {
    this.unschedule();
    const address = write(this.place);
    if (address === location.hash) return;
    history[how](null, "", address);
    this.address = location.hash;
    this.settledAt = Date.now();
  }

  unschedule() {
    clearTimeout(this.behind);
    this.behind = undefined;
  }

  /**
   * Show a view.
   * @param {Place["view"]} view
   */
  view(view) {
    // The addresses of other views have no request, or one engine's without its request.
    const { request } = this;
    this.go(view === "request" && request ? { view, engine: request.engine, id: request.id } : { view }, true);
    this.resolve();
    this.frames.draw("shell", "list", "empty", "head", "fresh", ...COLOURS, ...CURSOR);
  }

  /**
   * Show a request.
   * @param {number} key
   * @param {boolean} [hold] whether to stay with it
   * @param {Place["view"]} [view]
   * @param {boolean} [entry] whether the browser's back button returns from it
   */
  open(key, hold = true, view = "request", entry = hold) {
    const request = this.store.requests.get(key);
    if (!request) return;
    const same = key === this.key;
    const moved = !same || view !== this.place.view;
    const changes = { engine: request.engine, id: request.id, hold, view };
    this.go(same ? changes : { ...changes, pos: null, from: null, to: null }, entry && moved);
    if (hold && !same) this.announce(`Request ${request.id}, ${statusOf(request).word}`);
    this.show(key);
  }

  /** @param {number} key */
  show(key) {
    if (key !== this.key) {
      this.earlier = this.key;
      this.key = key;
      this.hover = null;
      this.span = new Span();
      this.restored = false;
    }
    this.onSubscription();
    this.frames.draw("shell", "list", "empty", "head", "fresh", ...COLOURS, ...CURSOR);
  }

  /** Find the request of the address, or follow the newest. */
  resolve() {
    const { place, store } = this;
    if (place.view === "request") {
      const key = this.kept(this.key, place.engine, place.id);
      if (key !== this.key) this.key = 0;
      const stays = key && (place.hold || store.requests.get(key)?.status === "live");
      const next = stays ? key : place.hold && place.id ? 0 : store.newest;
      if (next && next !== this.key) {
        if (next === key) this.show(next);
        else this.open(next, false);
      } else if (!next) {
        this.key = 0;
      }
    } else if (place.view === "compare") {
      this.key = this.kept(this.key, place.engine, place.id);
      this.otherKey = this.kept(this.otherKey, place.engine2, place.id2);
    }
    this.onSubscription();
  }

  /**
   * Return the key of an address's request: the shown one if it has that id, for others may too; 0 if there is none.
   * @param {number} key of the shown one
   * @param {string} engine
   * @param {string} id
   */
  kept(key, engine, id) {
    const shown = this.store.requests.get(key);
    return shown && shown.engine === engine && shown.id === id ? key : this.store.find(engine, id);
  }

  /**
   * Compare two requests.
   * @param {number} key
   * @param {number} [other] by default a pinned one, the one that was shown before, or the newest
   */
  compare(key, other = this.opposite(key)) {
    const [a, b] = [key, other].map((one) => this.store.requests.get(one));
    if (!a) return;
    const changes = { engine: a.engine, id: a.id, engine2: b?.engine ?? "", id2: b?.id ?? "" };
    this.go({ ...changes, view: "compare", hold: true, pos: null, from: null, to: null }, true);
    this.announce(b ? `Request ${a.id} and request ${b.id}` : `Request ${a.id}: choose a second one`);
    [this.hover, this.span, this.restored] = [null, new Span(), false];
    [this.key, this.otherKey] = [key, other];
    this.resolve();
    this.frames.draw("shell", "extra");
  }

  /**
   * Return the request to compare a request with; 0 if there is none.
   * @param {number} key
   */
  opposite(key) {
    const { place, store, earlier } = this;
    for (const [other, { engine, id }] of store.requests) {
      if (other !== key && place.pins.includes(nameOf(engine, id))) return other;
    }
    if (earlier !== key && store.requests.has(earlier)) return earlier;
    return [...store.requests.keys()].findLast((other) => other !== key) ?? 0;
  }

  /** @param {boolean} hold */
  hold(hold) {
    this.go({ hold });
    this.announce(hold ? "The selection stays" : "Following the newest request");
    this.resolve();
    this.frames.draw("shell", "list", "head");
  }

  /**
   * Put the cursor on a column.
   * @param {number | null} column
   * @param {boolean} [reveal] whether the plots move so that it is seen
   */
  point(column, reveal = true) {
    const { detail } = this;
    if (!detail) return;
    const kept = column === null ? null : Math.max(0, Math.min(detail.count - 1, column));
    this.hover = null;
    this.go({ pos: kept === null ? null : detail.base + kept });
    if (kept !== null && reveal && (kept < this.span.from || kept >= this.span.to)) {
      this.span.reveal(kept);
      this.spanned();
    }
    this.frames.draw(...CURSOR);
  }

  /** @param {number | null} column */
  over(column) {
    if (column === this.hover) return;
    this.hover = column;
    this.frames.draw(...CURSOR);
  }

  /** Note that the span has changed. */
  spanned() {
    const { span, detail } = this;
    const base = detail?.base ?? 0;
    this.go(span.whole ? { from: null, to: null } : { from: base + span.from, to: base + span.to });
    this.frames.draw("plots", "plots-cursor");
  }

  /**
   * Mark another layer; it also colours the tokens if a norm does.
   * @param {number} step
   */
  moveLayer(step) {
    const { detail } = this;
    if (!detail) return;
    const norms = detail.norms;
    const at = norms.indexOf(this.layer) + step;
    if (at >= 0 && at < norms.length) this.mark(norms[at]);
  }

  /** @param {number} row */
  mark(row) {
    const { detail } = this;
    if (!detail?.series[row] || detail.series[row].probe) return;
    const coloured = this.measured >= 0 && !detail.series[this.measured].probe;
    this.row = row;
    if (coloured) this.colourBy(row);
    else this.frames.draw("plots", "plots-cursor", "token");
    this.announce(detail.series[row].site);
  }

  /** @param {number} row */
  colourBy(row) {
    const one = this.detail?.series[row];
    if (!one) return;
    if (!one.probe) this.row = row;
    this.go({ by: seriesName(one) });
    this.frames.draw(...COLOURS, "plots-cursor");
  }

  /**
   * Change how colours are made.
   * @param {Partial<Place>} changes
   */
  recolour(changes) {
    this.go(changes);
    this.frames.draw(...COLOURS);
  }

  /**
   * Move a threshold; null for that of the file.
   * @param {number} row
   * @param {number | null} value
   */
  moveThreshold(row, value) {
    const one = this.detail?.series[row];
    if (!one) return;
    this.keepThreshold(seriesName(one), value === one.threshold ? null : value);
    this.frames.draw("plots", "token", ...(row === this.measured ? ["text", "tools"] : []));
  }

  /**
   * Keep a threshold that was moved, or that of the file for null.
   * @param {string} name of the series
   * @param {number | null} value
   */
  keepThreshold(name, value) {
    const { thresholds } = this.place;
    if (value === null) thresholds.delete(name);
    else thresholds.set(name, value);
    this.go({ thresholds });
  }

  /** @param {number} key */
  pin(key) {
    const request = this.store.requests.get(key);
    if (!request) return;
    const name = nameOf(request.engine, request.id);
    const { pins } = this.place;
    const pinned = pins.includes(name);
    this.go({ pins: pinned ? pins.filter((pin) => pin !== name) : [...pins, name] });
    this.announce(pinned ? "Unpinned" : "Pinned");
    this.frames.draw("list", "head");
  }
}

/** @param {{probe: string, site: string}} one */
export function seriesName(one) {
  return one.probe ? `probe:${one.probe}@${one.site}` : one.site;
}

/** @param {import("./protocol.js").Series} one */
export function seriesLabel(one) {
  return one.probe ? `${one.probe} (${one.site})` : one.site;
}

const STATUSES = {
  live: ["●", "live"],
  stop: ["✓", "done"],
  length: ["✓", "done, at its length limit"],
  abort: ["✕", "aborted"],
  error: ["✕", "error"],
};

/**
 * Return the mark and the word for a request's status.
 * @param {{status: string}} request
 */
export function statusOf({ status }) {
  const [mark, word] = STATUSES[/** @type {keyof STATUSES} */ (status)] ?? ["✓", status];
  return { mark, word };
}
