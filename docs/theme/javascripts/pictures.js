// Colours for the parts of Mermaid's pictures that the theme's own style does not reach, above all in dark mode.

const STYLE = `
  marker path, marker circle { fill: var(--md-mermaid-sequence-message-line-color) !important; stroke: none !important }
  .loopText, .loopText > tspan { fill: var(--md-mermaid-sequence-loop-fg-color) !important }
  .actor-line { stroke: var(--md-mermaid-sequence-actor-line-color) !important }
`

const initialize = mermaid.initialize
mermaid.initialize = settings => initialize({ ...settings, themeCSS: (settings.themeCSS ?? "") + STYLE })
mermaid.initialize({ startOnLoad: false })  // the theme draws them
