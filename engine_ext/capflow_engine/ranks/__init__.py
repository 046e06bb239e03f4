"""Whether the ranks of an engine steer alike: checksums of steps, and their comparison.

A worker folds each step that it plans, and reports the result to its hubs.
Invariant: no step waits for a comparison, and no fault of one ends an engine.
"""
