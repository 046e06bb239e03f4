"""The commands about probes: fit one on labelled captures, evaluate one, and convert one from SAELens.

`capflow.cli` imports them when they are run.
Invariant: a probe is judged on captures that it was not fitted on.
"""
