// @ts-check
// Theme: light or dark colours, as the system has them or as they were chosen.

const THEME = "capflow-theme";

/** @param {string | null} name */
export function chooseTheme(name) {
  if (name === "light" || name === "dark") {
    document.documentElement.dataset.theme = name;
    localStorage.setItem(THEME, name);
  } else {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(THEME);
  }
}

/** Use the colours that were chosen before. */
export function restoreTheme() {
  chooseTheme(localStorage.getItem(THEME));
}
