// @ts-check
// Pressed: the button that works when it is held. See `press.js`.

import { html, nothing } from "./lit.js";

/**
 * @param {import("./press.js").Press} press
 * @param {{id: string, label: string, again: string, title?: string, kind?: string, disabled?: boolean,
 *   run: () => void}} button again: the label after a first short press
 */
export function holdButton(press, { id, label, again, title, kind = "", disabled = false, run }) {
  const phase = press.of(id);
  const down = (/** @type {Event} */ event) => {
    if (!disabled) press.down(id, run, event.timeStamp);
  };
  const up = (/** @type {Event} */ event) => press.up(id, run, event.timeStamp);
  const leave = () => {
    if (press.of(id) === "holding") press.rest();
  };
  const isKey = (/** @type {KeyboardEvent} */ event) => event.key === "Enter" || event.key === " ";
  return html`<button type="button" id=${id} class="hold ${kind}" data-press=${phase} title=${title ?? nothing}
    aria-disabled=${disabled ? "true" : nothing}
    @pointerdown=${(/** @type {PointerEvent} */ event) => {
      if (event.button === 0) down(event);
    }}
    @pointerup=${up} @pointerleave=${leave} @pointercancel=${leave} @blur=${leave}
    @contextmenu=${(/** @type {Event} */ event) => event.preventDefault()}
    @click=${(/** @type {MouseEvent} */ event) => {
      // A click without a pointer or a key, of assistive technology.
      if (event.detail === 0 && !disabled) press.click(id, run, event.timeStamp);
    }}
    @keydown=${(/** @type {KeyboardEvent} */ event) => {
      if (!isKey(event)) return;
      event.preventDefault();
      if (!event.repeat) down(event);
    }}
    @keyup=${(/** @type {KeyboardEvent} */ event) => {
      if (!isKey(event)) return;
      event.preventDefault();
      up(event);
    }}><span>${phase === "again" ? again : label}</span></button>`;
}
