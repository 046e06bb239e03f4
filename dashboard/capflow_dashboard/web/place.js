// @ts-check
// Place: what the page shows, as its address: `#/r/ENGINE/ID?pos=37&by=probe:code`, or
// `#/compare/ENGINE/ID/ENGINE/ID`. Pure.

/**
 * @typedef {object} Place
 * @property {"requests" | "request" | "compare" | "population" | "alerts" | "health"} view
 * @property {string} engine of the request; empty, as the id is, for the newest one
 * @property {string} id
 * @property {string} engine2 of the request that it is compared with; empty, as the id is, for none
 * @property {string} id2
 * @property {"start" | "generated"} align from which token on two requests are beside each other
 * @property {number | null} pos the position of the cursor
 * @property {string} by what colours the tokens: `probe:NAME`, a site, or empty for the default
 * @property {"z" | "ratio" | "log" | "raw"} scale
 * @property {"request" | "baseline"} ref
 * @property {"norms" | "change" | "probes"} heat
 * @property {number | null} from the first position of the curves and the heatmap; null for all
 * @property {number | null} to
 * @property {string} q the filter
 * @property {string} sort a column, with a minus sign for descending
 * @property {string} probe the probe of the list
 * @property {boolean} hold whether the selection stays
 * @property {Map<string, number>} thresholds those that were moved, by name of the series
 * @property {string[]} pins `ENGINE/ID` of each pinned request, both encoded
 */

/** @returns {Place} */
export function nowhere() {
  return {
    view: "request",
    engine: "",
    id: "",
    engine2: "",
    id2: "",
    align: "start",
    pos: null,
    by: "",
    scale: "z",
    ref: "request",
    heat: "norms",
    from: null,
    to: null,
    q: "",
    sort: "-started",
    probe: "",
    hold: false,
    thresholds: new Map(),
    pins: [],
  };
}

const CHOICES = {
  align: ["start", "generated"],
  scale: ["z", "ratio", "log", "raw"],
  ref: ["request", "baseline"],
  heat: ["norms", "change", "probes"],
};
const PINS_MAX = 16;
const THRESHOLDS_MAX = 16;

/**
 * Return the name of a request in an address.
 * @param {string} engine
 * @param {string} id
 */
export function nameOf(engine, id) {
  return `${encodeURIComponent(wellFormed(engine))}/${encodeURIComponent(wellFormed(id))}`;
}

/** @param {string} text */
function wellFormed(text) {
  return text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
}

/**
 * Return the address of a place; values that are the default are left out.
 * @param {Place} place
 */
export function write(place) {
  const usual = nowhere();
  const query = new URLSearchParams();
  const names = /** @type {const} */ ([
    "pos",
    "by",
    "scale",
    "ref",
    "heat",
    "from",
    "to",
    "q",
    "sort",
    "probe",
    "align",
  ]);
  for (const name of names) {
    if (place[name] !== usual[name]) query.set(name, wellFormed(String(place[name])));
  }
  if (place.hold) query.set("hold", "1");
  for (const [name, value] of [...place.thresholds].slice(0, THRESHOLDS_MAX))
    query.append("threshold", `${value}@${wellFormed(name)}`);
  for (const pin of place.pins.slice(0, PINS_MAX)) query.append("pin", pin);
  let path = place.view === "request" ? "" : place.view;
  if (place.view === "request" && (place.id || place.engine)) path = `r/${nameOf(place.engine, place.id)}`;
  if (place.view === "compare") path += `/${nameOf(place.engine, place.id)}/${nameOf(place.engine2, place.id2)}`;
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

/**
 * Return the place of an address; what it does not say, or says wrongly, is the default.
 * @param {string} hash
 * @returns {Place}
 */
export function read(hash) {
  const place = nowhere();
  const [path, search = ""] = cut(hash.replace(/^#\/?/, ""), "?");
  const parts = path.split("/");
  if (parts[0] === "r" && parts.length === 3) {
    const [engine, id] = [decoded(parts[1]), decoded(parts[2])];
    if (engine !== null && id !== null) Object.assign(place, { view: "request", engine, id });
  } else if (parts[0] === "compare" && parts.length === 5) {
    const names = parts.slice(1).map(decoded);
    const [engine, id, engine2, id2] = names.map((name) => name ?? "");
    if (!names.includes(null)) Object.assign(place, { view: "compare", engine, id, engine2, id2, hold: true });
  } else if (parts[0] === "health" || parts[0] === "requests" || parts[0] === "population" || parts[0] === "alerts") {
    place.view = parts[0];
  }
  const query = new URLSearchParams(search);
  for (const name of /** @type {const} */ (["pos", "from", "to"])) {
    const text = query.get(name) ?? "";
    if (/^\d{1,9}$/.test(text)) place[name] = Number(text);
  }
  if (place.from === null || place.to === null || place.from >= place.to) place.from = place.to = null;
  for (const name of /** @type {const} */ (["by", "q", "sort", "probe"])) place[name] = query.get(name) ?? place[name];
  for (const name of /** @type {const} */ (["scale", "ref", "heat", "align"])) {
    const text = query.get(name) ?? "";
    if (CHOICES[name].includes(text)) Object.assign(place, { [name]: text });
  }
  place.hold = query.get("hold") === "1" || place.view === "compare";
  for (const text of query.getAll("threshold").slice(0, THRESHOLDS_MAX)) {
    const [value, name] = cut(text, "@");
    if (name && value.trim() && Number.isFinite(Number(value))) place.thresholds.set(name, Number(value));
  }
  place.pins = query.getAll("pin").slice(0, PINS_MAX);
  return place;
}

/** @param {string} text @param {string} sign */
function cut(text, sign) {
  const at = text.indexOf(sign);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return null;
  }
}
