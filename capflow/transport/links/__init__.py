"""The links: one peer's connection to its hub, for workers, schedulers and taps, each driven by a thread of its own.

The engine and the hub's own processes open them; a link never imports the hub.
Invariant: a frame or an action that a link took is delivered once, spilled, or counted as lost.
"""
