// @ts-check
// Againsheet: a sheet that runs the prompt of a request twice, plain and steered, with both answers beside each other.
//
// Invariant: nothing runs when it is closed.

import { Run, SIDES, split } from "./again.js";
import { keepFocus } from "./focus.js";
import { count, plural, tokenText, visible } from "./format.js";
import { html, nothing, render } from "./lit.js";
import { bounds, ratioOf, short, within } from "./ratio.js";
import { choice } from "./steerpanel.js";

/** @typedef {import("./page.js").Page} Page */

const TOKENS = 64;
const START = { add: 25, remove: 100, gain: 100 };
const LOST = "The connection to capflow was lost, which ends the run.";
const FINISHES = { stop: "ended by itself", length: "at its limit of tokens" };

export class AgainSheet {
  /**
   * @param {Page} page
   * @param {import("./controls.js").Controls} controls
   * @param {{send: (message: object) => boolean, number: () => number}} doors
   */
  constructor(page, controls, doors) {
    this.page = page;
    this.controls = controls;
    this.desk = controls.desk;
    this.doors = doors;
    this.everywhere = false;
    this.tokens = TOKENS;
    this.temperature = 0;
    /** What steers, in the form that the steering panel has it. */
    this.arming = {
      choice: { request: 0, way: /** @type {import("./ratio.js").Way} */ ("add"), name: "", percent: 0 },
    };
    /** @type {Run | null} */
    this.run = null;
    /** The request whose prompt is run: its key; 0 while the dashboard does not have it. */
    this.key = 0;
    this.of = { engine: "", id: "" };
    this.box = document.createElement("dialog");
    this.box.id = "again";
    this.box.className = "help again";
    this.box.setAttribute("aria-labelledby", "again-title");
    this.box.addEventListener("click", (event) => {
      if (event.target === this.box) this.box.close();
    });
    this.box.addEventListener("close", () => this.stop());
    document.body.append(this.box);
  }

  /** @param {number} key of the request */
  open(key) {
    if (key !== this.key) this.run = null;
    this.key = key;
    this.of = this.page.store.requests.get(key) ?? this.of;
    this.page.hold(true);
    this.draw(true);
    if (!this.box.open) this.box.showModal();
  }

  // What steers, as the steering panel has it.

  get bounds() {
    return bounds(this.arming.choice.way, this.desk.offer?.ratio_max ?? 0);
  }

  get site() {
    return this.desk.offer?.vectors.find((vector) => vector.name === this.arming.choice.name)?.site ?? "";
  }

  /** @param {Partial<import("./arming.js").Choice>} changes */
  choose(changes) {
    const { choice } = this.arming;
    const { way } = choice;
    Object.assign(choice, changes);
    choice.percent = within(choice.way === way ? choice.percent : START[choice.way], this.bounds);
    this.draw();
  }

  /** Choose the first vector or module, if the chosen one is not offered. */
  follow() {
    const { choice } = this.arming;
    const { vectors = [], modules = [] } = this.desk.offer ?? {};
    const names = choice.way === "gain" ? modules : vectors.map((vector) => vector.name);
    if (names.includes(choice.name)) return;
    choice.way = vectors.length ? "add" : "gain";
    choice.name = vectors[0]?.name ?? modules[0] ?? "";
    choice.percent = within(START[choice.way], this.bounds);
  }

  // Commands.

  get running() {
    return this.run !== null && !this.run.over;
  }

  get may() {
    return this.key !== 0 && !this.running && !this.desk.frozen && this.arming.choice.name !== "" && this.desk.may;
  }

  begin() {
    if (!this.may) return;
    const { way, name, percent } = this.arming.choice;
    const id = this.doors.number();
    this.run = new Run(id, short(way, visible(name), percent));
    const how = way === "gain" ? { kind: "gain" } : { kind: "steer", mode: way, everywhere: this.everywhere };
    const { tokens, temperature } = this;
    const again = { id, request: this.key, name, ratio: ratioOf(percent), tokens, temperature, ...how };
    if (!this.doors.send({ again })) this.run.lose("There is no connection to capflow.");
    this.draw();
  }

  stop() {
    if (this.running) this.doors.send({ again: { id: this.doors.number(), stop: true } });
  }

  /** @param {import("./protocol.js").AgainNews} news */
  take(news) {
    this.run?.take(news);
    this.page.frames.draw("again");
  }

  /** The connection is another one: the server has ended the run, and may have other keys. */
  lose() {
    this.run?.lose(LOST);
    this.key = 0;
    this.page.frames.draw("again");
  }

  // What is shown.

  draw(opens = false) {
    if (!opens && !this.box.open) return;
    this.follow();
    this.key ||= this.page.store.find(this.of.engine, this.of.id);
    keepFocus(this.box, () => render(this.sheet(), this.box), "again-run");
  }

  sheet() {
    const { desk, page, run } = this;
    const { hello, requests } = page.store;
    const request = requests.get(this.key);
    const { way } = this.arming.choice;
    const where = (/** @type {boolean} */ value, /** @type {string} */ name) => html`<button type="button"
      aria-pressed=${this.everywhere === value ? "true" : "false"} @click=${() => {
        this.everywhere = value;
        this.draw();
      }}>${name}</button>`;
    return html`<div class="help-head"><h2 id="again-title">Run again, steered</h2>${this.controls.dialogPart(
      "again-",
    )}<button type="button" class="icon" aria-label="Close" title="Close, which stops the run" @click=${() =>
      this.box.close()}>✕</button></div>
      <div class="again-body">
        <p>The prompt of <bdi><b>${visible(this.of.id)}</b></bdi>${
          request ? `, ${plural(request.prompt_length, "token")},` : ", which the dashboard does not have now,"
        } runs twice at <bdi>${visible(hello?.again?.server ?? "")}</bdi>: plain, and steered.</p>
        <div class="again-form">${choice(this, "again")}
          <div class="steer-line">${
            way === "gain"
              ? nothing
              : html`<span class="segments" role="group" aria-label="What is steered">${where(
                  false,
                  "The answer",
                )}${where(true, "Prompt and answer")}</span>`
          }${this.number("tokens", "Tokens", 1, hello?.again?.tokens_max ?? TOKENS, 1)}${this.number(
            "temperature",
            "Temperature",
            0,
            hello?.again?.temperature_max ?? 0,
            0.1,
          )}</div>
          <div class="steer-line"><button type="button" class="primary" id="again-run" aria-disabled=${
            this.may ? nothing : "true"
          } @click=${() => this.begin()}>Run both</button><button type="button" class="toggle" id="again-stop"
            aria-disabled=${this.running ? nothing : "true"} @click=${() => this.stop()}>Stop</button>
            ${desk.frozen ? html`<span class="soft">Release the kill switch to run.</span>` : nothing}
          </div></div>
        <p id="again-state" role="status" class=${run?.error ? "bad" : ""}>${this.state()}</p>
        ${run && !run.error ? this.answers(run) : nothing}
      </div>`;
  }

  /**
   * @param {"tokens" | "temperature"} name
   * @param {string} label
   * @param {number} low
   * @param {number} high
   * @param {number} step
   */
  number(name, label, low, high, step) {
    return html`<label class="field"><span>${label}</span><input type="number" id="again-${name}" min=${low} max=${high}
      step=${step} .value=${String(this[name])} @change=${(/** @type {any} */ event) => {
        const value = Number(event.target.value);
        const whole = step === 1 ? Math.round(value) : value;
        this[name] = Math.min(high, Math.max(low, Number.isFinite(whole) ? whole : low));
        event.target.value = this[name];
      }}></label>`;
  }

  state() {
    const { run } = this;
    if (!run) return "";
    if (run.error) return visible(run.error);
    const { difference } = run;
    const first = `The first token that differs is number ${count(difference + 1)} of the answers.`;
    if (!run.over) return difference < 0 ? "Running…" : first;
    if (difference >= 0) return first;
    return SIDES.some((name) => run.sides[name].error) ? "Over." : "Over. The answers are equal.";
  }

  /** @param {Run} run */
  answers(run) {
    const { page } = this;
    const { difference } = run;
    const keys = SIDES.map((name) => this.keyOf(run.sides[name].request));
    return html`<div class="again-sides">${SIDES.map((name) => this.side(run, name, difference))}</div>
      ${
        run.over && keys.every((key) => key)
          ? html`<p><button type="button" class="small" id="again-compare" @click=${() => {
              this.box.close();
              page.compare(keys[0], keys[1]);
            }}>Compare in all layers</button></p>`
          : run.over && SIDES.every((name) => run.sides[name].tokens)
            ? html`<p class="soft" id="again-absent">These requests are not among those that the dashboard has.</p>`
            : nothing
      }`;
  }

  /**
   * @param {Run} run
   * @param {import("./again.js").SideName} name
   * @param {number} difference
   */
  side(run, name, difference) {
    const side = run.sides[name];
    const [before, piece, behind] = split(side, difference);
    const finish = side.finish ? (FINISHES[/** @type {keyof FINISHES} */ (side.finish)] ?? side.finish) : "";
    const how = side.error ? "" : side.over ? finish || "over" : side.request ? "running" : "waiting";
    return html`<section class="again-side" data-side=${name} aria-labelledby="again-${name}-title">
      <h3 id="again-${name}-title">${name === "plain" ? "Plain" : html`Steered: <bdi>${run.label}</bdi>`}</h3>
      <p class="soft">${plural(side.tokens, "token")}${how ? `, ${visible(how)}` : ""}</p>
      ${side.error ? html`<p class="bad">${visible(side.error)}</p>` : nothing}
      <div class="again-text" tabindex="0" role="region" aria-label="Answer, ${name}"><bdi>${before}${
        piece
          ? html`<mark title="The first token that differs"><span class="unseen">first that differs: </span>${tokenText(
              piece[1],
              piece[0][0] ?? -1,
            )}</mark>`
          : nothing
      }${behind}</bdi></div>
    </section>`;
  }

  /**
   * Return the key of a run's request; 0 if the dashboard does not have it.
   * @param {string} id
   */
  keyOf(id) {
    const { requests } = this.page.store;
    return [...requests.keys()].findLast((key) => id && requests.get(key)?.id === id) ?? 0;
  }
}
