// @ts-check
// App: joins the feed, the page and the views. Messages are taken and drawn in animation frames only.

import { Alarm } from "./alarm.js";
import { emptyState } from "./empty.js";
import { Extras } from "./extra.js";
import { Feed } from "./feed.js";
import { Frames } from "./frames.js";
import { header, noticeOf } from "./header.js";
import { onInks } from "./inks.js";
import { onKillKey } from "./killkey.js";
import { Later, style } from "./later.js";
import { List } from "./list.js";
import { html, nothing, render } from "./lit.js";
import { nextNumber } from "./naming.js";
import { Page } from "./page.js";
import { sheetText } from "./palette.js";
import { Plots } from "./plots.js";
import { decode, offerOf, VERSION } from "./protocol.js";
import { requestHead, requestTools } from "./request.js";
import { Store } from "./store.js";
import { restoreTheme } from "./theme.js";
import { Tokens } from "./tokens.js";

const $ = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));

const PLOT_SHARE = 60;

restoreTheme();
const sheet = new CSSStyleSheet();
sheet.replaceSync(sheetText());
document.adoptedStyleSheets = [sheet];

const frames = new Frames();
const page = new Page(frames);

render(
  html`<div class="request-head" id="request-head"></div>
    <div class="request-tools" id="request-tools"></div>
    <div class="text" id="text" role="listbox" tabindex="0" aria-orientation="horizontal"
      aria-label="Text, by token"></div>
    <aside class="panel" id="token" aria-label="Token" tabindex="0"></aside>
    <div class="plots" id="plots"></div>`,
  $("request"),
);
const list = new List($("list"), page);
const tokens = new Tokens($("text"), page);
const plots = new Plots($("plots"), page);
const extras = new Extras($("main"), page);
const alarm = new Alarm($("alarm"), page);
plots.onChosen = () => tokens.reveal();
page.announce = (/** @type {string} */ text) => {
  $("announce").textContent = text;
};

/** What a screen reader shall say in the next frame. @type {string[]} */
const lines = [];
page.say = (/** @type {string} */ text) => {
  if (!lines.includes(text)) lines.push(text);
  frames.draw("said");
};

// When the plots were drawn, and how long it took.
const plotted = { at: 0, costMs: 0, planned: false };

// The columns that changed since the text was written.
const written = { first: Infinity, end: 0, fresh: false };

frames.add("shell", () => {
  const { view } = page.place;
  const has = page.request !== undefined;
  document.body.dataset.view = view;
  const own = extras.shows(view);
  $("request").hidden = own || !has;
  $("empty").hidden = own || has;
  frames.stale.add("extra");
  // With each heartbeat, for a mute may end.
  frames.draw("alarm");
  const { request } = page;
  const alarms = page.alarms ? `(${page.alarms}) ` : "";
  document.title = own
    ? `${alarms}${view[0].toUpperCase()}${view.slice(1)} · capflow`
    : request
      ? `${alarms}${request.id.slice(0, 60)} · capflow`
      : `${alarms}capflow`;
});
frames.add("top", () => {
  render(header(page), $("top"));
  const lines = noticeOf(page);
  $("notice").hidden = !lines.length;
  render(
    lines.map((line) => html`<p>${line}</p>`),
    $("notice"),
  );
  const { state } = page;
  if (state !== document.body.dataset.state) page.announce(lines[0] ?? `The page is ${state}`);
  document.body.dataset.state = state;
});
frames.add("controls", () => {
  controls?.drawBar();
  // Results of actions do not replace what the page says of itself, so they have a region of their own.
  if (controls?.desk.may) $("said").role = "status";
  if (help.value?.box.open) help.value.draw(dialogPart());
  page.again?.draw();
});
frames.add("list", () => list.draw());
frames.add("empty", () => {
  if (!page.request) render(emptyState(page), $("empty"));
});
frames.add("head", () => {
  render(requestHead(page), $("request-head"));
  if (controls?.open) frames.draw("steer");
});
frames.add("steer", () => controls?.drawPanel());
frames.add("again", () => page.again?.draw());
frames.add("said", () => {
  $("said").textContent = lines.splice(0).join(". ");
});
frames.add("fresh", () => {
  if (page.key !== shown.key || page.detail !== shown.detail) {
    [shown.key, shown.detail] = [page.key, page.detail];
    tokens.clear();
    Object.assign(written, { first: 0, end: page.detail?.count ?? 0, fresh: true });
  }
  $("request").dataset.loading = page.detail ? "" : "yes";
  if (page.detail) restore();
});
frames.add("text", () => {
  if (!page.detail) return;
  if (written.fresh || written.end > written.first) tokens.write(written.first, written.end);
  Object.assign(written, { first: Infinity, end: 0, fresh: false });
  tokens.paint();
});
frames.add("text-colours", () => tokens.paint());
frames.add("tools", () => render(requestTools(page), $("request-tools")));
frames.add("plots", () => {
  const begun = performance.now();
  plots.draw();
  plotted.at = performance.now();
  plotted.costMs = plotted.at - begun;
});
frames.add("plots-cursor", () => plots.drawCursor());
frames.add("text-cursor", () => tokens.drawCursor());
frames.add("token", () => {
  render(page.detail ? (token.get()?.(page) ?? token.stead()) : nothing, $("token"));
});
frames.add("extra", () => extras.draw());
frames.add("alarm", () => alarm.draw());

/** What the text shows. @type {{key: number, detail: import("./detail.js").Detail | null}} */
const shown = { key: -1, detail: null };

/** Show the span and the token of the address, once, when the request's tokens are there. */
function restore() {
  const { detail, place, span } = page;
  if (!detail || page.restored) return;
  page.restored = true;
  span.grow(detail.count);
  if (place.from !== null && place.to !== null) span.set(place.from - detail.base, place.to - detail.base);
  if (place.pos !== null) requestAnimationFrame(() => tokens.reveal());
}

// Messages.

/** Messages that are not taken yet. @type {ArrayBuffer[]} */
const waiting = [];
let seq = 0;

const feed = new Feed({
  onOpen() {
    waiting.length = 0;
    sent = "";
  },
  onMessage(buffer) {
    waiting.push(buffer);
    controls?.desk.beat();
    // A hidden page draws nothing, and has no frames: it takes messages as they come.
    if (document.hidden) take();
    else frames.ask();
  },
  onState(state, why) {
    [page.link, page.why] = [state, why];
    frames.draw("top", "shell", "empty");
  },
});

// What is loaded when it is first needed.

/** Without a place of its own, a part that is missing is named in the notice. @param {Later<any>} part */
function noted(part) {
  if (part.failed) page.missing.add(part.name);
  else page.missing.delete(part.name);
  frames.draw("top");
}

/** The panel of the token, and the lens in it. */
const token = new Later(
  "The panel of the token",
  async () => {
    const [{ openPanel }] = await Promise.all([import("./token.js"), style("token.css")]);
    return openPanel(page, (message) => feed.send(message));
  },
  () => frames.draw("token"),
);

/** @type {Later<import("./help.js").HelpSheet>} */
const help = new Later(
  "Help",
  async () => {
    const [{ HelpSheet }] = await Promise.all([import("./help.js"), style("extra.css")]);
    return new HelpSheet();
  },
  () => noted(help),
);

/** @type {Later<import("./export.js").ExportSheet>} */
const exports = new Later(
  "Export",
  async () => {
    const [{ ExportSheet }] = await Promise.all([import("./export.js"), style("extra.css")]);
    return new ExportSheet(page, list, plots);
  },
  () => noted(exports),
);

/** The sheet that runs a request again; it needs the controls.
 * @type {Later<import("./againsheet.js").AgainSheet>} */
const again = new Later(
  "Run again",
  async () => {
    const [{ AgainSheet }] = await Promise.all([import("./againsheet.js"), style("steer.css"), style("extra.css")]);
    if (!controls) throw new Error("The kill switch is missing.");
    return new AgainSheet(page, controls, {
      send: (message) => feed.send(message),
      number: () => nextNumber(sessionStorage, Date.now()),
    });
  },
  () => {
    noted(again);
    page.again = again.value;
  },
);
page.runAgain = async () => {
  const { key } = page;
  if (page.mayRun && page.request && controls) (await again.load())?.open(key);
};

const openHelp = async () => (await help.load())?.open(dialogPart());
const openExport = async () => (await exports.load())?.open(extras.pictures());

/** The kill switch and the way to the panel that steers; null until the page may steer.
 * @type {import("./controls.js").Controls | null} */
let controls = null;
/** Whether the kill switch was pressed before it was there. */
let killed = false;

/** @type {Later<import("./controls.js").Controls>} */
const steering = new Later(
  "The kill switch",
  async () => {
    const [{ openControls }] = await Promise.all([import("./controls.js"), style("kill.css")]);
    return openControls(page, feed, { bar: $("controls"), panel: $("steer") });
  },
  () => {
    noted(steering);
    controls = steering.value;
    if (!controls) return;
    page.desk = controls.desk;
    const { hello, steering: held } = page.store;
    if (hello) controls.desk.greet(hello);
    if (held) controls.desk.take({ steering: held });
    if (killed) controls.kill();
    killed = false;
  },
);

const dialogPart = () => controls?.dialogPart() ?? "";

onKillKey(
  () => offerOf(page.store.hello) !== null,
  () => {
    if (controls) controls.kill();
    else {
      // It needs nothing but the connection; once the kill switch is there, it is sent again and shown.
      killed = true;
      feed.send({ act: { id: Date.now(), kind: "kill" } });
      steering.load();
    }
  },
);

function take() {
  if (!waiting.length) return;
  /** @type {Set<string>} */ const changed = new Set();
  for (const buffer of waiting.splice(0)) {
    const { head, numbers } = decode(buffer);
    if (head.hello) greet(head.hello);
    controls?.desk.take(head);
    if (head.lens) page.lens?.take(head.lens);
    if (head.stored) page.stored?.take(head.stored);
    if (head.again) page.again?.take(head.again);
    for (const name of page.store.take(head, numbers)) changed.add(name);
    if (head.detail && head.detail.key === page.key) {
      written.first = Math.min(written.first, head.detail.first);
      written.end = Math.max(written.end, head.detail.first + head.detail.count);
    }
    if (head.seq) seq = head.seq;
  }
  stale(changed);
}

/** @param {import("./protocol.js").Hello} hello */
function greet(hello) {
  if (hello.version !== VERSION) {
    page.announce("Reload the page: capflow has another version now.");
    location.reload();
  }
  page.store = new Store();
  page.key = page.otherKey = 0;
  page.lens?.clear();
  page.stored?.clear();
  page.again?.lose();
  // A failure is tried again with each heartbeat, which says that the server is there.
  if (controls) controls.desk.greet(hello);
  else if (offerOf(hello)) steering.load();
}

/**
 * Draw what the changes concern.
 * @param {Set<string>} changed
 */
function stale(changed) {
  if (changed.has("engines") || changed.has("counts") || changed.has("rates") || changed.has("heartbeat"))
    frames.draw("top");
  if (changed.has("hello") || changed.has("heartbeat")) frames.draw("shell", "empty");
  if (changed.has("alerts")) frames.draw("alarm");
  if (changed.has("heartbeat") && steering.failed && offerOf(page.store.hello)) steering.load();
  if (changed.has("counts") && controls?.open) frames.draw("steer");
  // A subscription belongs to its connection, which begins with a hello.
  if (changed.has("requests") || changed.has("engines") || changed.has("hello")) {
    page.resolve();
    frames.draw("list", "head", "again");
    if (!page.request) frames.draw("shell", "empty");
  }
  if (extras.shows(page.place.view) && extras.concerns(changed)) frames.draw("extra");
  if (changed.has("engines")) frames.draw("empty");
  if (changed.has("fresh")) frames.draw("fresh", "plots-cursor", "text-cursor");
  if (changed.has("detail") || changed.has("colours")) {
    frames.draw("text", "tools");
    if (changed.has("fresh") || changed.has("colours")) frames.draw("plots");
    else plotSoon();
    if (page.column !== null || changed.has("fresh") || changed.has("colours")) frames.draw("token", "plots-cursor");
  }
}

/** Draw the plots at once, or later if they take long: while tokens come, they get at most a 60th of the time. */
function plotSoon() {
  const waitMs = plotted.at + PLOT_SHARE * plotted.costMs - performance.now();
  if (waitMs <= 0) frames.draw("plots");
  else if (!plotted.planned) {
    plotted.planned = true;
    setTimeout(() => {
      plotted.planned = false;
      frames.draw("plots");
    }, waitMs);
  }
}

frames.before.push(take);
frames.after.push(() => {
  if (!seq) return;
  feed.send({ seen: seq, frame_ms: Number((frames.p95 ?? 0).toFixed(1)) });
  seq = 0;
});

// What this page wants.

let sent = "";
let planned = false;

page.onSubscription = () => {
  if (planned) return;
  planned = true;
  setTimeout(() => {
    planned = false;
    const { view } = page.place;
    const request = view === "request" || view === "compare" ? page.key : 0;
    const other = view === "compare" ? page.otherKey : 0;
    const shown = view === "population" ? page.populated : { engine: "", probe: page.probe };
    const wanted = JSON.stringify({
      request,
      other,
      window: list.window,
      probe: shown.probe,
      population: shown.engine,
      health: view === "health",
      alerts: view === "alerts",
    });
    if (wanted === sent || feed.state === "connecting" || !feed.socket) return;
    sent = wanted;
    feed.send({ subscribe: JSON.parse(wanted) });
  }, 60);
};

// Keys, wherever the focus is.

/** @type {Record<string, () => unknown>} */
const KEYS = {
  j: () => list.move(1),
  k: () => list.move(-1),
  ArrowRight: () => tokens.go((page.cursor ?? -1) + 1),
  ArrowLeft: () => tokens.go((page.cursor ?? 1) - 1),
  ArrowDown: () => tokens.go(page.cursor === null ? 0 : tokens.line(page.cursor, 1)),
  ArrowUp: () => tokens.go(page.cursor === null ? 0 : tokens.line(page.cursor, -1)),
  Home: () => tokens.go(0),
  End: () => tokens.go(Infinity),
  "[": () => page.moveLayer(-1),
  "]": () => page.moveLayer(1),
  "+": () => plots.zoom(0.5),
  "=": () => plots.zoom(0.5),
  "-": () => plots.zoom(2),
  0: () => plots.fit(),
  ",": () => plots.pan(-0.25),
  ".": () => plots.pan(0.25),
  f: () => page.hold(!page.place.hold),
  p: () => page.pin(page.key),
  s: () => controls?.toggle(),
  r: () => page.place.view === "request" && page.runAgain(),
  l: () => {
    if (page.detail && page.cursor !== null && page.store.hello?.lens)
      page.lens?.ask(page.key, page.detail.base + page.cursor);
  },
  "/": () => {
    if (extras.shows(page.place.view)) page.view("requests");
    if (getComputedStyle(list.box).display === "none") page.view("requests");
    requestAnimationFrame(() => list.filter.focus());
  },
  c: () => (page.place.view === "compare" ? page.view("request") : page.compare(page.key)),
  n: () => extras.next(),
  e: openExport,
  "?": openHelp,
};
const OF_REQUEST = new Set([
  "ArrowRight",
  "ArrowLeft",
  "ArrowDown",
  "ArrowUp",
  "Home",
  "End",
  "[",
  "]",
  "+",
  "=",
  "-",
  "0",
  ",",
  ".",
]);

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  const target = /** @type {HTMLElement} */ (event.target);
  const typing = target.matches("input:not([type=range]), select, textarea");
  if (event.key === "Escape") {
    if (target.closest("#steer")) controls?.toggle(false);
    else if (typing) target.blur();
    else if (page.cursor !== null) page.point(null);
    return;
  }
  if (typing || !(event.key in KEYS)) return;
  if (OF_REQUEST.has(event.key)) {
    if (!page.detail || page.place.view !== "request") return;
    // Elements that scroll or have keys of their own keep these.
    if (event.key.length > 1 && target.closest(".scroll, .panel, .steer, button, summary")) return;
  }
  event.preventDefault();
  KEYS[event.key]();
});

$("top").addEventListener("click", (event) => {
  if (event.target instanceof Element && event.target.closest("#help-open")) openHelp();
  if (event.target instanceof Element && event.target.closest("#export-open")) openExport();
});
$("skip").addEventListener("click", () => ($("request").hidden ? $("main") : $("text")).focus());

addEventListener("popstate", visit);
addEventListener("hashchange", visit);

function visit() {
  // A new link was opened in this tab, which loads nothing by itself.
  if (location.hash.startsWith("#token=")) location.reload();
  else page.visit();
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) frames.draw("top", "list", "head", "fresh", "text", "plots", "token", "extra");
});
onInks(() => {
  frames.draw("text", "plots", "plots-cursor", "tools", "extra");
});

frames.draw("shell", "top", "controls", "list", "empty");
// A page that may steer has loaded these before this module.
if (document.querySelector("script[data-right=steer]")) steering.load();
await feed.start();
page.visit();
