// Keys: a list is one tab stop; the arrow keys move within it.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };

/** Let the keyboard move the focus between the `[role=option]` of a list; Enter and Space call onChosen(option). */
export function roving(list, onChosen) {
  list.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const options = [...list.querySelectorAll("[role=option]")];
    const at = options.indexOf(document.activeElement);
    if (at < 0) return;
    let to = null;
    if (event.key in STEPS) to = Math.min(options.length - 1, Math.max(0, at + STEPS[event.key]));
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = options.length - 1;
    else if (event.key === "Enter" || event.key === " ") onChosen(options[at]);
    else return;
    event.preventDefault();
    if (to !== null) options[to].focus();
  });
  list.addEventListener("focusin", (event) => stopAt(list, event.target.closest("[role=option]")));
}

/** Make an option the only tab stop of its list. */
export function stopAt(list, option) {
  if (!option) return;
  for (const other of list.querySelectorAll('[role=option][tabindex="0"]')) other.tabIndex = -1;
  option.tabIndex = 0;
}
