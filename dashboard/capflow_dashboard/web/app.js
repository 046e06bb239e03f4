// The page: keeps what the server sends, decides what is shown, and draws it.

import { drawRate, Heatmap } from "./charts.js";
import { Feed } from "./feed.js";
import { RequestList, statusOf } from "./requests.js";
import { MISSING, normalise, onTheme, Scale, show } from "./scale.js";
import { textOf, TokenView } from "./tokens.js";

const RATES_S = 120;
const RATES = ["tokens", "rows", "bytes"];
const Z_REACH = 3;
const SCALE_TITLES = { z: "robust z", ratio: "ratio to median", log: "log₁₀ norm", raw: "norm" };

const $ = (id) => document.getElementById(id);

const state = {
  engines: [],
  rates: { tokens: [], rows: [], bytes: [] },
  // The shown request: {key, base, series, ids, texts, values: one array for each series}.
  detail: null,
  selected: 0,
  // The site that the user has chosen; kept from request to request.
  wantedSite: "",
  // "norm", or `probe:` and the name of a probe.
  measure: "norm",
  // The column of the token under the pointer or the focus.
  column: null,
  stale: { tokens: false, heat: false },
};

// Messages from the server.

const feed = new Feed({
  onOpen() {
    requests.clear();
    state.detail = null;
    state.rates = { tokens: [], rows: [], bytes: [] };
    feed.select(0);
    state.selected = 0;
  },
  onMessage({ head, numbers }) {
    if (head.engines) showEngines(head.engines);
    if (head.counts) showCounts(head.counts);
    if (head.rates) takeRates(head.rates);
    if (head.requests || head.gone) takeRequests(head.requests ?? [], head.gone ?? []);
    if (head.detail) takeDetail(head.detail, numbers);
  },
  onState(name, why) {
    $("link").dataset.state = name;
    const words = { live: "connected", lost: "reconnecting", ended: "stopped", refused: "disconnected" };
    $("link").textContent = words[name];
    $("notice").hidden = !why;
    $("notice").textContent = why;
    document.body.classList.toggle("stale", name !== "live");
    $("tip").hidden = true;
  },
});

function showEngines(engines) {
  state.engines = engines;
  const box = $("engine");
  box.replaceChildren();
  for (const engine of engines) {
    const line = document.createElement("div");
    const model = document.createElement("strong");
    model.textContent = engine.model;
    const facts = document.createElement("span");
    const size = `${engine.num_layers} layers × ${engine.hidden_size}`;
    facts.textContent = ` ${size}, ${engine.dtype}, ${engine.sites} sites · engine ${engine.name}`;
    line.append(model, facts);
    for (const problem of engine.problems) {
      const warning = document.createElement("span");
      warning.className = "problem";
      warning.textContent = ` ⚠ ${problem}`;
      line.append(warning);
    }
    line.title = line.textContent;
    box.append(line);
  }
  $("empty-engine").hidden = engines.length > 0;
  $("empty-request").hidden = engines.length === 0;
  if (engines.length) {
    $("empty-model").textContent = engines[0].model;
    $("empty-model-name").textContent = engines[0].model;
  }
}

function showCounts(counts) {
  $("count-open").textContent = counts.open.toLocaleString("en");
  $("count-done").textContent = counts.done.toLocaleString("en");
  const reasons = Object.entries(counts.dropped);
  const dropped = reasons.reduce((total, [, rows]) => total + rows, 0);
  $("count-dropped").textContent = dropped.toLocaleString("en");
  $("count-dropped-box").classList.toggle("bad", dropped > 0);
  $("count-dropped-box").title = reasons.map(([reason, rows]) => `${reason}: ${rows}`).join(", ");
  $("not-kept").hidden = !counts.not_kept;
  $("not-kept").textContent = `${counts.not_kept} more are running. They are not shown: requests_max is reached.`;
}

function takeRates(rates) {
  for (const name of RATES) {
    const values = [...state.rates[name], ...rates[name]].slice(-RATES_S);
    state.rates[name] = values;
    $(`rate-${name}`).textContent = amount(values.at(-1), name === "bytes");
    $(`peak-${name}`).textContent = `peak ${amount(Math.max(...values), name === "bytes")}`;
  }
  drawRates();
}

function drawRates() {
  for (const name of RATES) if (state.rates[name].length) drawRate($(`chart-${name}`), state.rates[name], RATES_S);
}

function amount(value, bytes) {
  if (!bytes) return value.toLocaleString("en");
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

// The choice of the shown request.

const requests = new RequestList($("requests"), (key) => {
  $("follow").checked = false;
  select(key);
});

function takeRequests(changed, gone) {
  requests.update(changed, gone);
  follow();
  if (changed.some((request) => request.key === state.selected)) showTitle();
}

function follow() {
  const shown = requests.requests.get(state.selected);
  const stays = shown && (!$("follow").checked || shown.status === "live");
  const newest = requests.newest();
  if (!stays && newest && newest !== state.selected) select(newest);
}

function select(key) {
  state.selected = key;
  requests.show(key);
  feed.select(key);
  showTitle();
}

$("follow").addEventListener("change", follow);

function showTitle() {
  const request = requests.requests.get(state.selected);
  if (!request) return;
  const { mark, word } = statusOf(request);
  $("shown-id").textContent = request.id;
  $("shown-id").title = request.id;
  $("shown-status").textContent = `${mark} ${word}`;
  $("shown-status").dataset.status = request.status;
  const generated = Math.max(0, request.tokens - request.prompt_length);
  const lost = request.rows_lost ? ` · ${request.rows_lost.toLocaleString("en")} rows lost` : "";
  $("shown-facts").textContent = `${request.prompt_length} prompt tokens, ${generated} generated${lost}`;
}

// The tokens of the shown request.

const tokens = new TokenView({
  box: $("tokens"),
  prompt: $("tokens-prompt"),
  generated: $("tokens-generated"),
  onPointed: (column, element) =>
    pointAt(column, column === null ? null : measured().row, element?.getBoundingClientRect()),
});

function takeDetail(news, numbers) {
  if (news.key !== state.selected) return;
  const request = requests.requests.get(news.key);
  if (news.fresh) {
    const { key, base, series } = news;
    state.detail = { key, base, series, ids: [], texts: [], values: series.map(() => []) };
    state.column = null;
    tokens.clear();
    $("tip").hidden = true;
    $("empty").hidden = true;
    $("view").hidden = false;
    $("tokens-before").hidden = base === 0;
    $("tokens-before").textContent = `Positions 0 to ${base - 1} are not kept.`;
    showChoices();
  }
  const detail = state.detail;
  if (!detail || detail.key !== news.key || detail.base !== news.base) return;
  for (let i = 0; i < news.count; i++) {
    detail.ids[news.first + i] = news.ids[i];
    detail.texts[news.first + i] = news.texts[i];
    for (let row = 0; row < detail.values.length; row++) {
      detail.values[row][news.first + i] = numbers[row * news.count + i];
    }
  }
  tokens.write(detail, request?.prompt_length ?? Infinity, news.first, news.first + news.count);
  redraw();
}

/** Fill the select elements with the series of the shown request. */
function showChoices() {
  const { series } = state.detail;
  const probes = series.filter((one) => one.probe);
  const measures = [new Option("row norm", "norm")];
  for (const one of probes) measures.push(new Option(`probe ${one.probe} (${one.site})`, `probe:${one.probe}`));
  $("measure").replaceChildren(...measures);
  if (!measures.some((option) => option.value === state.measure)) state.measure = "norm";
  $("measure").value = state.measure;
  const sites = series.filter((one) => !one.probe).map((one) => one.site);
  $("site").replaceChildren(...sites.map((site) => new Option(site, site)));
  $("site").value = sites.includes(state.wantedSite) ? state.wantedSite : (sites.at(-1) ?? "");
}

/** Return the series that colours the tokens, and its row. */
function measured() {
  const { series } = state.detail;
  const isProbe = state.measure !== "norm";
  const site = $("site").value;
  const row = series.findIndex((one) =>
    isProbe ? `probe:${one.probe}` === state.measure : !one.probe && one.site === site,
  );
  return { isProbe, row, one: series[row] };
}

$("measure").addEventListener("change", (event) => {
  state.measure = event.target.value;
  redraw();
});
$("site").addEventListener("change", (event) => {
  state.wantedSite = event.target.value;
  redraw();
});
$("scale").addEventListener("change", () => redraw());
onTheme(() => {
  redraw();
  drawRates();
});

// Stale parts are drawn at the next frame of the screen; the heatmap waits as long as `heat.wait` says.

let awaited = false;

function redraw({ tokens = true } = {}) {
  state.stale.tokens ||= tokens;
  state.stale.heat = true;
  if (!awaited) requestAnimationFrame(draw);
  awaited = true;
}

function draw() {
  awaited = false;
  if (!state.detail) return;
  if (state.stale.tokens) paintTokens();
  if (!state.stale.heat) return;
  if (heat.wait === 0) {
    drawHeat();
  } else if (!awaited) {
    awaited = true;
    setTimeout(() => requestAnimationFrame(draw), heat.wait);
  }
}

function scaleOptions(name) {
  return name === "z" ? { centre: 0, reach: Z_REACH } : {};
}

function paintTokens() {
  state.stale.tokens = false;
  const { isProbe, row, one } = measured();
  if (!one) return;
  const scaleName = $("scale").value;
  const values = state.detail.values[row];
  const scaled = isProbe ? values : normalise(values, scaleName);
  const scale = isProbe
    ? new Scale([values], { centre: one.threshold })
    : new Scale([scaled], scaleOptions(scaleName));
  tokens.paint(values, scaled, scale, isProbe ? one.threshold : null);
  $("site-label").classList.toggle("idle", isProbe);
  $("site").disabled = isProbe;
  $("legend-bar").style.backgroundImage = scale.gradient;
  $("legend-low").textContent = `≤ ${show(scale.low)}`;
  $("legend-high").textContent = `≥ ${show(scale.high)}`;
  const title = isProbe ? `score, underlined from ${show(one.threshold)} on` : SCALE_TITLES[scaleName];
  $("legend").title = title;
  $("legend").setAttribute("aria-label", `Colours from ${show(scale.low)} to ${show(scale.high)}: ${title}`);
}

const heat = new Heatmap($("heat"), {
  onPointed: (column, row, event) =>
    pointAt(column, row, event && new DOMRect(event.clientX - 6, event.clientY - 6, 12, 12)),
  onChosen(column, row) {
    const one = state.detail.series[row];
    state.wantedSite = one.site;
    state.measure = "norm";
    showChoices();
    redraw();
    tokens.focus(column);
  },
});

function drawHeat() {
  state.stale.heat = false;
  const { series, values, base } = state.detail;
  const scaleName = $("scale").value;
  const norms = series.filter((one) => !one.probe);
  const rows = norms.map((_, row) => normalise(values[row], scaleName));
  const hooks = new Set(norms.map((one) => one.hook));
  const site = measured().one?.site;
  const row = norms.findIndex((one) => one.site === site);
  $("heat-note").textContent = [...hooks].join(", ");
  heat.draw({
    rows,
    labels: norms.map((one) => (hooks.size > 1 ? `${one.hook} ${one.layer}` : String(one.layer))),
    base,
    scale: new Scale(rows, scaleOptions(scaleName)),
    title: SCALE_TITLES[scaleName],
    axis: hooks.size > 1 ? "" : "layer",
    row: row < 0 ? null : row,
    column: state.column,
  });
}

// The tip at the token or cell under the pointer.

function pointAt(column, row, where) {
  const tip = $("tip");
  if (state.column !== column) {
    state.column = column;
    redraw({ tokens: false });
  }
  tip.hidden = column === null || !state.detail?.series[row];
  if (tip.hidden) return;
  const { detail } = state;
  const one = detail.series[row];
  const value = detail.values[row][column];
  const request = requests.requests.get(detail.key);
  const position = detail.base + column;
  const lines = [
    ["token", textOf(detail, column)],
    ["position", `${position}, ${position < (request?.prompt_length ?? 0) ? "prompt" : "generated"}`],
    ["token id", detail.ids[column] < 0 ? "unknown" : String(detail.ids[column])],
    [one.probe ? `${one.probe} at ${one.site}` : `norm at ${one.site}`, show(value)],
  ];
  if (one.probe) lines.push(["fires", value >= one.threshold ? `yes, from ${show(one.threshold)} on` : "no"]);
  else if (value !== MISSING) {
    for (const name of ["z", "ratio"]) {
      lines.push([SCALE_TITLES[name], show(normalise(detail.values[row], name)[column])]);
    }
  }
  tip.replaceChildren(
    ...lines.map(([name, text]) => {
      const line = document.createElement("div");
      const [label, content] = [document.createElement("span"), document.createElement("b")];
      label.textContent = `${name} `;
      content.textContent = text;
      line.append(label, content);
      return line;
    }),
  );
  const size = tip.getBoundingClientRect();
  const below = where.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(where.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? where.bottom + 8 : Math.max(8, where.top - size.height - 8)}px`;
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("tip").hidden = true;
});
