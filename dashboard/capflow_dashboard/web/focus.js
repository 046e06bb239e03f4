// @ts-check
// Focus: keeps it inside a part that is drawn again.

/**
 * Draw a part; if what had the focus in it is gone, focus something else in it.
 * @param {HTMLElement} box
 * @param {() => void} draw
 * @param {string} fallback
 */
export function keepFocus(box, draw, fallback) {
  const had = box.contains(document.activeElement);
  draw();
  if (had && !box.contains(document.activeElement)) document.getElementById(fallback)?.focus();
}
