// @ts-check
// Lit: the parts of lit-html that the page uses, with their types.

import * as repeating from "./vendor/lit-html/directives/repeat.js";
import * as lit from "./vendor/lit-html/lit-html.js";

/** @type {typeof import("lit-html").html} */
export const html = lit.html;
/** @type {typeof import("lit-html").nothing} */
export const nothing = /** @type {any} */ (lit.nothing);
/** @type {typeof import("lit-html").render} */
export const render = /** @type {any} */ (lit.render);
/** @type {typeof import("lit-html").svg} */
export const svg = lit.svg;
/** @type {typeof import("lit-html/directives/repeat.js").repeat} */
export const repeat = /** @type {any} */ (repeating.repeat);
