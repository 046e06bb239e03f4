"""Steering that outlives a request: the store of modules and global state, its budget, and vectors in files.

The server, `capflow.LLM` and the jobs use it.
Invariant: what the store accepts fits the engine's bank.
"""
