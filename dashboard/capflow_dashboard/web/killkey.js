// @ts-check
// Killkey: the key of the kill switch. It is heard from the first moment on, wherever the focus is but in a text.

/** Input elements that take text. */
const TEXT = "textarea, input:not([type=range], [type=radio], [type=checkbox], [type=button])";

/**
 * Call `kill` for each press of Shift+K.
 * @param {() => boolean} may whether the page may steer
 * @param {() => void} kill
 */
export function onKillKey(may, kill) {
  const listener = (/** @type {KeyboardEvent} */ event) => {
    if (!event.shiftKey || event.altKey || event.ctrlKey || event.metaKey || !isK(event) || !may()) return;
    if (event.target instanceof Element && event.target.matches(TEXT)) return;
    event.preventDefault();
    event.stopPropagation();
    if (!event.repeat) kill();
  };
  document.addEventListener("keydown", listener, true);
}

/** @param {KeyboardEvent} event */
function isK({ key, code }) {
  // Layouts without Latin letters have the key at its place.
  return key.toLowerCase() === "k" || (code === "KeyK" && !/^[a-z]$/i.test(key));
}
