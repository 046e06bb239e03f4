// @ts-check
// Inks: the colours of the style sheet, for canvases. They are read once for each theme.

/** @type {Map<string, string>} */
const inks = new Map();
let family = "";
/** @type {"light" | "dark" | ""} */
let shade = "";
const probe = document.createElement("i");
probe.hidden = true;

/**
 * Return the colour of a custom property, such as `--ink`.
 * @param {string} name
 */
export function ink(name) {
  let colour = inks.get(name);
  if (colour === undefined) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    colour = getComputedStyle(probe).color;
    inks.set(name, colour);
  }
  return colour;
}

/**
 * Return the page's font for canvases. It is read once: to ask for a style while the page changes costs a layout.
 * @param {string} [weight]
 */
export function font(weight = "400") {
  if (!family) family = getComputedStyle(document.body).fontFamily;
  return `${weight} 11px ${family}`;
}

/** @returns {"light" | "dark"} */
export function theme() {
  if (!shade) {
    const chosen = document.documentElement.dataset.theme;
    if (chosen === "light" || chosen === "dark") shade = chosen;
    else shade = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  return shade;
}

/**
 * Call `call` whenever the colours of the page change.
 * @param {() => void} call
 */
export function onInks(call) {
  const renew = () => {
    inks.clear();
    shade = "";
    call();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  matchMedia("(forced-colors: active)").addEventListener("change", renew);
  new MutationObserver(renew).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

/**
 * Return a canvas context whose units are CSS pixels, cleared.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function sized(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    [canvas.width, canvas.height] = [w, h];
    canvas.style.width = `${w / ratio}px`;
    canvas.style.height = `${h / ratio}px`;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/**
 * Return a pattern of diagonal stripes or of dots.
 * @param {CanvasRenderingContext2D} context
 * @param {"stripes" | "dots"} kind
 * @param {string} colour
 */
export function pattern(context, kind, colour) {
  const tile = new OffscreenCanvas(6, 6);
  const pen = /** @type {OffscreenCanvasRenderingContext2D} */ (tile.getContext("2d"));
  pen.strokeStyle = pen.fillStyle = colour;
  if (kind === "dots") pen.fillRect(2, 2, 1.5, 1.5);
  else {
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const at of [-6, 0, 6]) {
      pen.moveTo(at, 6);
      pen.lineTo(at + 6, 0);
    }
    pen.stroke();
  }
  return /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
}
