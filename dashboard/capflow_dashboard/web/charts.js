// The charts, drawn with plotly: the rates, and the heatmap of norms.

/* global Plotly */

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Elements that are resized with the window.
const sized = new WeakSet();

/** Draw one rate: the values of the latest seconds, the newest last. */
export function drawRate(element, values, seconds) {
  if (!sized.has(element)) {
    sized.add(element);
    addEventListener("resize", () => Plotly.Plots.resize(element));
  }
  const accent = colour("--accent");
  const x = values.map((_, i) => i - values.length + 1);
  const top = Math.max(...values, 1);
  return Plotly.react(
    element,
    [
      {
        type: "scatter",
        mode: "lines",
        x,
        y: values,
        line: { color: accent, width: 1.5 },
        fill: "tozeroy",
        fillcolor: colour("--accent-soft"),
        hoverinfo: "skip",
      },
    ],
    {
      margin: { l: 0, r: 0, t: 2, b: 1 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { range: [1 - seconds, 0], visible: false, fixedrange: true },
      yaxis: { range: [0, top * 1.08], visible: false, fixedrange: true },
      showlegend: false,
    },
    { ...CONFIG, staticPlot: true },
  );
}

export class Heatmap {
  /**
   * onPointed(column, row, event): the pointer is on a cell; all null when it leaves.
   * onChosen(column, row): a cell was clicked.
   */
  constructor(element, { onPointed, onChosen }) {
    this.element = element;
    this.onPointed = onPointed;
    this.onChosen = onChosen;
    this.base = 0;
    this.listens = false;
    this.drawing = false;
    // Duration of the last drawing, ms.
    this.cost = 0;
    this.drawnAt = -Infinity;
  }

  /** How long to wait before the next drawing, ms: drawing takes at most a quarter of the page's time. */
  get wait() {
    const pause = Math.max(200, 3 * this.cost);
    return this.drawing ? pause : Math.max(0, pause - (performance.now() - this.drawnAt));
  }

  /**
   * rows: arrays of scaled values.
   * labels: one for each row.
   * row, column: what is marked; null for none.
   */
  async draw({ rows, labels, base, scale, title, axis, row, column }) {
    this.base = base;
    const begun = performance.now();
    this.drawing = true;
    const count = rows[0]?.length ?? 0;
    const each = Math.max(1, Math.ceil(rows.length / 12));
    const shown = labels.map((_, i) => i).filter((i) => i % each === 0);
    const ink = colour("--ink-soft");
    const mark = { type: "rect", layer: "above", line: { color: colour("--mark"), width: 1.5 } };
    const axes = { showgrid: false, zeroline: false, fixedrange: true };
    const shapes = [];
    if (row !== null) shapes.push({ ...mark, xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5 });
    if (column !== null) {
      const x = base + column;
      shapes.push({ ...mark, yref: "paper", y0: 0, y1: 1, x0: x - 0.5, x1: x + 0.5 });
    }
    await Plotly.react(
      this.element,
      [
        {
          type: "heatmap",
          z: rows.map((values) => Array.from(values, (value) => (Number.isFinite(value) ? value : null))),
          x0: base,
          dx: 1,
          y0: 0,
          dy: 1,
          zmin: scale.low,
          zmax: scale.high,
          colorscale: scale.colorscale,
          hoverinfo: "none",
          xgap: count < 120 ? 1 : 0,
          ygap: rows.length < 40 ? 1 : 0,
          colorbar: {
            thickness: 10,
            outlinewidth: 0,
            len: 1,
            xpad: 8,
            ypad: 0,
            tickfont: { color: ink, size: 11 },
            title: { text: title, side: "right", font: { color: ink, size: 11 } },
          },
        },
      ],
      {
        margin: { l: 44, r: 8, t: 4, b: 34 },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: ink },
        xaxis: {
          ...axes,
          title: { text: "position", standoff: 4 },
          range: [base - 0.5, base + Math.max(count, 16) - 0.5],
          tickformat: "d",
        },
        yaxis: {
          ...axes,
          title: { text: axis, standoff: 4 },
          tickmode: "array",
          tickvals: shown,
          ticktext: shown.map((i) => labels[i]),
          range: [-0.5, rows.length - 0.5],
        },
        shapes,
        dragmode: false,
      },
      CONFIG,
    );
    this.drawing = false;
    this.drawnAt = performance.now();
    this.cost = this.drawnAt - begun;
    if (!this.listens) this.listen();
  }

  listen() {
    this.listens = true;
    new ResizeObserver(() => Plotly.Plots.resize(this.element)).observe(this.element);
    const cell = (event) => [Math.round(event.points[0].x) - this.base, Math.round(event.points[0].y)];
    this.element.on("plotly_hover", (event) => this.onPointed(...cell(event), event.event));
    this.element.on("plotly_unhover", () => this.onPointed(null, null, null));
    this.element.on("plotly_click", (event) => this.onChosen(...cell(event)));
  }
}
