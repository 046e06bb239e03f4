// @ts-check
// Help: the sheet with what to do first, what the signs mean, and the keys.

import { keepFocus } from "./focus.js";
import { html, nothing, render } from "./lit.js";
import { chooseTheme } from "./theme.js";

/** @type {[string[], string][]} */
export const KEYS = [
  [["j", "k"], "next, previous request"],
  [["←", "→"], "previous, next token"],
  [["↑", "↓"], "the line of text above, below"],
  [["[", "]"], "previous, next layer"],
  [["+", "−", "0"], "zoom in, zoom out, show all"],
  [[",", "."], "move the zoomed part left, right"],
  [["/"], "filter the requests"],
  [["f"], "follow the newest request, or stay"],
  [["p"], "pin the request"],
  [["c"], "compare with another request, or return"],
  [["n"], "the first token at which two requests differ"],
  [["e"], "export: link, picture, CSV, Parquet"],
  [["Home", "End"], "first, last token"],
  [["l"], "the lens of the token, if the dashboard has one"],
  [["s"], "steer, if the dashboard may"],
  [["r"], "run the request again, plain and steered, if the dashboard may"],
  [["Shift", "K"], "stop all steering at once, everywhere"],
  [["Esc"], "leave the filter, the cursor, this sheet"],
  [["?"], "this sheet"],
];

const FILTERS = [
  ["capital france", "both words are in the text or the id"],
  ['text:"of France"', "the text has these words"],
  ["probe:code>2", "the highest score of the probe is above 2; also mean:, last:, fired:code"],
  ["status:live", "also done, stop, length, abort, error"],
  ["steered:yes", "something steered it; also steered:>10"],
  ["engine:x id:x tokens:>500 lost:yes", "by engine, id, size, lost rows"],
  ["-status:error", "a minus sign: all others"],
];

export class HelpSheet {
  constructor() {
    this.box = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
    this.box.addEventListener("click", (event) => {
      if (event.target === this.box) this.box.close();
    });
  }

  /** @param {unknown} kill the kill switch, where there is one */
  open(kill) {
    this.draw(kill);
    if (!this.box.open) this.box.showModal();
  }

  /** @param {unknown} kill */
  draw(kill) {
    const sheet = helpSheet(() => this.box.close(), kill);
    keepFocus(this.box, () => render(sheet, this.box), "dialog-kill");
  }
}

/**
 * @param {() => void} close
 * @param {unknown} kill the kill switch, where there is one
 */
function helpSheet(close, kill) {
  return html`<div class="help-head"><h2 id="help-title">Help</h2>${kill}<button type="button" class="icon"
    aria-label="Close" autofocus @click=${close}>✕</button></div>
    <div class="help-body">
      <section><h3>Start here</h3><ol class="plain">
        <li>The <b>list</b> has every request. The newest one is shown until it is over, then the next. Choose one to
          stay with it.</li>
        <li>The <b>text</b> is coloured by a probe's score or by the norm of a layer. Point at a token for all its
          numbers.</li>
        <li>The <b>curves</b> show each probe. Drag its threshold to see what would fire; nothing in the engine
          changes.</li>
        <li>The <b>heatmap</b> has a line for each layer. Drag across it to zoom, double-click to see all. The strip
          above it is the whole request.</li>
      </ol></section>
      <section><h3>Keys</h3><dl class="keys">${KEYS.map(
        ([keys, does]) => html`<div><dt>${keys.map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${does}</dd></div>`,
      )}</dl></section>
      <section><h3>Colours and signs</h3><ul class="plain signs">
        <li><span class="bar div" aria-hidden="true"></span> Deviation from the reference: below, as usual, above. The
          reference is the request's prompt, or its first 16 rows if the prompt is shorter. It is computed once, so a
          colour never changes.</li>
        <li><span class="t fires">fires</span> The score is at or above the probe's threshold.</li>
        <li><span class="t steered">steered</span> Something changed the model at this token.</li>
        <li><span class="t odd">NaN</span> The row holds NaN or infinity: stripes in the heatmap.</li>
        <li><span class="t gone">no row</span> No row was captured, or it was lost: dots in the heatmap.</li>
      </ul></section>
      ${
        kill
          ? html`<section><h3>Steering</h3><ul class="plain">
        <li>Steering adds a named vector to the model's stream, removes its direction, or scales a module. Answers to
          users change.</li>
        <li>Arm, preview, then hold the button for 0.6 s, or press it twice, slowly. Once applied, moving the slider
          changes it at once.</li>
        <li>It lasts while this page is open, and ends within seconds after it is closed.</li>
        <li><b>Stop all steering</b> takes back what pages, programs and modules steer, in every request, and refuses
          more until it is released. What a request itself came with stays.</li>
      </ul></section>`
          : nothing
      }
      <section><h3>Filter</h3><dl class="keys filters">${FILTERS.map(
        ([text, does]) => html`<div><dt><code>${text}</code></dt><dd>${does}</dd></div>`,
      )}</dl></section>
      <section><h3>Look</h3><label class="field"><span>Colours</span><select id="theme" @change=${(
        /** @type {any} */
        event,
      ) => chooseTheme(event.target.value)}>
        ${["system", "light", "dark"].map(
          (name) =>
            html`<option value=${name} ?selected=${
              name === (document.documentElement.dataset.theme ?? "system")
            }>${name}</option>`,
        )}</select></label></section>
    </div>`;
}
