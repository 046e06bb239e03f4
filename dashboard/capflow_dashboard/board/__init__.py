"""The state of requests: their tokens, norms, scores and steering, and the counts of engines.

The channel's reader writes it, the server and its views read it. It does no I/O.
Invariant: its memory is bounded, whatever engines send.
"""
