"""Rollouts: the answers to prompts under vectors and scales, and the judges that score them.

The job of `capflow rollouts` imports it.
Invariant: a row says all that its answer and its scores depend on; rows of other settings are never mixed in.
"""
