"""Steering that outlives a request: the store of modules and of the global state, the bank's budget, vectors in files.

The server, `capflow.LLM` and the jobs use it.
Invariant: what the store accepts fits the engine's bank.
"""
