// @ts-check
// Health: the hub's consumers and workers, as `capflow status --json` describes them, and this page itself.

import { count, duration, number, plural, short, size, visible } from "./format.js";
import { html, nothing, render } from "./lit.js";
import { drawCurve } from "./strip.js";

/** @typedef {import("./page.js").Page} Page */
/** @typedef {Record<string, any>} Status */

const FULL = 0.9;
const LAG_S = 2;
const FRAME_MS = 33;
const CHART_PX = 110;
const GAP_PX = 16;
const SECONDS = 120;
const RATES = /** @type {const} */ ([
  ["tokens", "Tokens/s, the last two minutes", short],
  ["rows", "Rows/s", short],
  ["bytes", "Bytes/s", size],
]);

export class Health {
  /**
   * @param {HTMLElement} box
   * @param {Page} page
   */
  constructor(box, page) {
    this.page = page;
    /** @type {Map<string, {output: HTMLElement, canvas: HTMLCanvasElement}>} */
    this.charts = new Map();
    render(html`<h2 id="health-title">Health</h2><div class="rates"></div><div class="health-body"></div>`, box);
    this.rates = /** @type {HTMLElement} */ (box.querySelector(".rates"));
    this.body = /** @type {HTMLElement} */ (box.querySelector(".health-body"));
    box.setAttribute("aria-labelledby", "health-title");
    new ResizeObserver(() => page.frames.draw("extra")).observe(box);
  }

  draw() {
    const { page } = this;
    const { status } = page.store;
    render(
      html`${this.itself()}${status ? this.hub(status) : html`<p class="soft">Waiting for the hub's status.</p>`}`,
      this.body,
    );
    this.drawRates();
  }

  itself() {
    const { store, frames, state } = this.page;
    const { heartbeat } = store;
    const frame = frames.p95;
    const facts = [
      ["state", state, state !== "live" && state !== "stored"],
      ["lag of the newest rows", duration(heartbeat?.lag_s ?? null), (heartbeat?.lag_s ?? 0) > LAG_S],
      ["rows skipped by the dashboard", count(heartbeat?.skipped_rows ?? 0), (heartbeat?.skipped_rows ?? 0) > 0],
      ["frame time, p95", frame === null ? "–" : `${frame.toFixed(0)} ms`, frame !== null && frame > FRAME_MS],
      ["work in a frame, p95", frames.cost === null ? "–" : `${frames.cost.toFixed(1)} ms`, false],
      ["requests here", count(store.requests.size), false],
    ];
    return html`<h3>This page</h3><dl class="tiles" id="health-page">${facts.map(
      ([name, value, bad]) => html`<div class=${bad ? "bad" : ""}><dt>${name}</dt><dd>${value}</dd></div>`,
    )}</dl>`;
  }

  /** @param {Status} status */
  hub(status) {
    const { problems = [], notices = [], consumers = {}, sessions = [], memory, requests, actions } = status;
    const workers = sessions.filter((/** @type {Status} */ one) => one.role === "worker");
    const others = sessions.length - workers.length;
    return html`
      ${
        problems.length
          ? html`<ul class="problems" id="problems">${problems.map(
              (/** @type {string} */ text) => html`<li>${text}</li>`,
            )}</ul>`
          : nothing
      }
      ${
        notices.length
          ? html`<ul class="problems soft">${notices.map((/** @type {string} */ text) => html`<li>${text}</li>`)}</ul>`
          : nothing
      }
      <h3>Consumers</h3>
      ${table(
        "health-consumers",
        ["consumer", "policy", "queue", "lag", "busy for", "rows", "lost rows", "errors", "state"],
        Object.entries(consumers).map(([name, one]) => consumerCells(name, one)),
      )}
      <h3>Workers</h3>
      ${
        workers.length
          ? table(
              "health-workers",
              ["engine", "pp/dp/tp", "credit used", "rows", "bytes", "lost rows", "last frame"],
              workers.map(workerCells),
            )
          : html`<p class="soft">No worker is connected.</p>`
      }
      ${
        others
          ? html`<p class="soft">${plural(others, "other session")}: ${sessions
              .filter((/** @type {Status} */ one) => one.role !== "worker")
              .map((/** @type {Status} */ one) => `${one.role} ${visible(String(one.engine ?? ""))}`)
              .join(", ")}</p>`
          : nothing
      }
      <h3>Hub</h3>
      <dl class="tiles">
        ${tile("version", status.version)}${tile("up for", duration(status.uptime_s))}${tile(
          "frames",
          count(status.frames ?? 0),
        )}
        ${tile("requests open / done", `${count(requests?.open ?? 0)} / ${count(requests?.done ?? 0)}`)}
        ${tile("requests failed", count(requests?.failed ?? 0), requests?.failed > 0)}
        ${tile(
          "actions applied / rejected",
          `${count(actions?.applied ?? 0)} / ${count(actions?.rejected ?? 0)}`,
          actions?.rejected > 0,
        )}
        ${tile("last frame", status.last_frame_age_s == null ? "–" : `${duration(status.last_frame_age_s)} ago`)}
        ${tile("lost rows", losses(status.dropped_rows), Object.keys(status.dropped_rows ?? {}).length > 0)}
      </dl>
      ${
        memory
          ? html`<h3>Memory</h3>${table(
              "health-memory",
              ["part", "taken"],
              Object.entries(memory.parts ?? {}).map(([part, one]) => [
                text(part),
                meter(/** @type {any} */ (one).bytes, /** @type {any} */ (one).bytes_max, part),
              ]),
            )}`
          : nothing
      }`;
  }

  /** Draw the rates of the last two minutes. */
  drawRates() {
    const { page } = this;
    const all = this.rates.clientWidth;
    if (!all) return;
    const width = Math.floor(all < 700 ? all : (all - 2 * GAP_PX) / 3);
    for (const [name, title, show] of RATES) {
      const values = page.store.rates[name];
      const chart = this.charts.get(name) ?? this.make(name, title);
      chart.output.textContent = show(values.at(-1) ?? 0);
      drawCurve(chart.canvas, {
        width,
        height: CHART_PX,
        left: 58,
        right: 2,
        pad: 8,
        from: 1 - SECONDS,
        to: 1,
        low: 0,
        high: Math.max(1, ...values),
        columns: values.map((_, i) => i - values.length + 1),
        values,
        colour: "--accent",
        fill: "--accent-soft",
        show,
      });
    }
  }

  /**
   * @param {string} name
   * @param {string} title
   */
  make(name, title) {
    const box = document.createElement("figure");
    box.dataset.rate = name;
    const head = document.createElement("figcaption");
    const chart = { output: document.createElement("b"), canvas: document.createElement("canvas") };
    chart.canvas.setAttribute("role", "img");
    chart.canvas.setAttribute("aria-label", `${title.split(",")[0]}, the last two minutes`);
    head.append(title, chart.output);
    box.append(head, chart.canvas);
    this.rates.append(box);
    this.charts.set(name, chart);
    return chart;
  }
}

/**
 * @param {string} id
 * @param {string[]} heads
 * @param {unknown[][]} rows
 */
function table(id, heads, rows) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${heads[0]}><table class="health-table"
    id=${id}>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>${rows.map(
      (cells) =>
        html`<tr>${cells.map((cell, i) => (i ? html`<td>${cell}</td>` : html`<th scope="row">${cell}</th>`))}</tr>`,
    )}</tbody></table></div>`;
}

/** @param {unknown} value */
function text(value) {
  return html`<bdi>${visible(String(value))}</bdi>`;
}

/**
 * @param {string} name
 * @param {unknown} value
 * @param {boolean} [bad]
 */
function tile(name, value, bad = false) {
  return html`<div class=${bad ? "bad" : ""}><dt>${name}</dt><dd>${value ?? "–"}</dd></div>`;
}

/**
 * Return a meter with its share, and how much of how much it is.
 * @param {number} part
 * @param {number} whole
 * @param {string} name
 */
function meter(part, whole, name) {
  const share = whole ? Math.min(1, part / whole) : 0;
  return html`<span class="meter ${share > FULL ? "full" : ""}" role="meter" aria-label=${name} aria-valuemin="0"
    aria-valuemax="100"
      aria-valuenow=${Math.round(share * 100)}><svg width="72" height="8" aria-hidden="true"><rect class="track"
        width="72" height="8" rx="4" /><rect class="part" width=${share * 72} height="8" rx="4" /></svg></span>
    <span class="nowrap">${Math.round(share * 100)} % <span class="soft">of ${size(whole)}</span></span>`;
}

/** @param {Record<string, number> | undefined} dropped */
function losses(dropped) {
  const entries = Object.entries(dropped ?? {});
  return entries.length ? entries.map(([reason, rows]) => `${count(rows)} ${reason}`).join(", ") : "0";
}

/**
 * @param {string} name
 * @param {Status} one
 */
function consumerCells(name, one) {
  const lost = losses(one.dropped_rows);
  const wrong = one.trouble ?? (one.retrying ? `retries ${one.retrying.method}: ${one.retrying.reason}` : null);
  return [
    text(name),
    one.policy,
    meter(one.queued_bytes, one.queue_bytes_max, `queue of ${name}`),
    html`<span class=${one.lag_s > LAG_S ? "bad" : ""}>${duration(one.lag_s)}</span>`,
    duration(one.busy_s),
    count(one.rows ?? 0),
    lost === "0" ? "0" : html`<span class="bad">${lost}</span>`,
    one.errors ? html`<span class="bad">${count(one.errors)}</span>` : "0",
    wrong ? html`<span class="bad">${wrong}</span>` : html`<span class="good">✓ works</span>`,
  ];
}

/** @param {Status} one */
function workerCells(one) {
  const dropped = one.worker
    ? Object.values(one.worker.dropped_rows ?? {}).reduce((sum, rows) => sum + Number(rows), 0)
    : 0;
  return [
    text(one.engine),
    (one.rank ?? []).join("/"),
    meter(one.held_bytes, one.held_bytes + one.credit_bytes, `credit of ${one.engine}`),
    count(one.rows ?? 0),
    size(one.bytes ?? 0),
    dropped ? html`<span class="bad">${count(dropped)}</span>` : "0",
    one.last_frame_age_s == null ? "–" : `${duration(one.last_frame_age_s)} ago`,
  ];
}
