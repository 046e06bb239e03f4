// The tokens of the shown request, as coloured text.

import { roving, stopAt } from "./keys.js";
import { MISSING } from "./scale.js";

/** Return the text of a token, or `#` and its id if it has no text, or a dot without either. */
export function textOf(detail, column) {
  const text = detail.texts[column];
  if (text) return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
  return detail.ids[column] >= 0 ? `#${detail.ids[column]}` : "·";
}

export class TokenView {
  /** onPointed(column, element): the pointer or the focus is on a token; both null when it leaves. */
  constructor({ box, prompt, generated, onPointed }) {
    this.box = box;
    this.prompt = prompt;
    this.generated = generated;
    this.elements = [];
    // The present look of each element, so that only changes are written.
    this.steps = [];
    roving(box, () => {});
    const columnOf = (event) => event.target.closest?.("[role=option]");
    for (const kind of ["pointerover", "focusin"]) {
      box.addEventListener(kind, (event) => {
        const element = columnOf(event);
        if (element) onPointed(Number(element.dataset.column), element);
      });
    }
    box.addEventListener("pointerleave", () => onPointed(null, null));
    box.addEventListener("focusout", () => onPointed(null, null));
  }

  clear() {
    this.elements = [];
    this.steps = [];
    this.prompt.replaceChildren();
    this.generated.replaceChildren();
  }

  /** Update the tokens of columns first to end - 1. Positions below promptLength are the prompt's. */
  write(detail, promptLength, first, end) {
    const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 48;
    for (let column = this.elements.length; column < end; column++) {
      const element = document.createElement("span");
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", "false");
      element.setAttribute("aria-describedby", "tip");
      element.tabIndex = -1;
      element.className = "token";
      element.dataset.column = column;
      element.dataset.position = detail.base + column;
      this.elements.push(element);
      this.steps.push("");
      (detail.base + column < promptLength ? this.prompt : this.generated).append(element);
    }
    for (let column = first; column < end; column++) {
      const element = this.elements[column];
      const text = textOf(detail, column);
      if (element.textContent !== text) element.textContent = text;
      element.classList.toggle("id", !detail.texts[column]);
    }
    if (!this.box.querySelector('[role=option][tabindex="0"]')) stopAt(this.box, this.elements[0]);
    if (atEnd && this.box.scrollHeight > this.box.clientHeight) this.box.scrollTop = this.box.scrollHeight;
  }

  /**
   * Colour every token.
   * values: as captured.
   * scaled: the values on the scale.
   * fires: the lowest value that is marked; null to mark none.
   */
  paint(values, scaled, scale, fires) {
    for (let column = 0; column < this.elements.length; column++) {
      const value = values[column];
      const finite = Number.isFinite(scaled[column]);
      const odd = value !== MISSING && !Number.isFinite(value);
      const step = finite ? scale.step(scaled[column]) : -1;
      const marked = fires !== null && value >= fires;
      const name = `${scale.name}/${step}/${odd}/${marked}`;
      if (this.steps[column] === name) continue;
      this.steps[column] = name;
      const element = this.elements[column];
      element.style.backgroundColor = finite ? scale.ramp[step].back : "";
      element.style.color = finite ? scale.ramp[step].fore : "";
      element.classList.toggle("odd", odd);
      element.classList.toggle("fires", marked);
      element.classList.toggle("missing", value === MISSING);
    }
  }

  focus(column) {
    this.elements[column]?.focus();
  }
}
