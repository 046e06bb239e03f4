"""Controllers in a worker: what they see of a step, and what they decide.

Invariant: a controller that raises, is slow or returns nonsense changes nothing but its own decisions.
"""
