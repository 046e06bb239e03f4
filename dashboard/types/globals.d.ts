// uPlot is loaded as a script of its own, not as a module.
import type uPlotClass from "uplot";

declare global {
  const uPlot: typeof uPlotClass;
}
