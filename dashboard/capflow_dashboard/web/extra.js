// @ts-check
// Extra: loads what is not needed at first, when it is first shown: its modules and its style sheet.

/** @type {Promise<void> | null} */
let styled = null;

/** Load the style sheet of these views, once. */
function style() {
  styled ??= new Promise((done) => {
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = "extra.css";
    // Without the sheet it can still be read.
    link.onload = link.onerror = () => done();
    document.head.append(link);
  });
  return styled;
}

/** @type {Promise<import("./export.js").ExportSheet> | null} */
let sheet = null;

/**
 * Open the sheet of exports.
 * @param {import("./page.js").Page} page
 * @param {import("./list.js").List} list
 * @param {import("./plots.js").Plots} plots
 */
export async function openExport(page, list, plots) {
  sheet ??= Promise.all([import("./export.js"), style()]).then(
    ([{ ExportSheet }]) => new ExportSheet(page, list, plots),
  );
  (await sheet).open([]);
}
