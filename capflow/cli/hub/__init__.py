"""The commands about a hub: run one without a model, ask it, act through it, and look into its spools.

`capflow.cli` imports each command when it is run. Nothing here imports torch or vLLM.
Invariant: an error is one line on standard error, with exit code 1 or 2.
"""
