"""The requests of a hub: which run, what each consumer wants of them, and their results.

Only the hub writes to them, on its own thread.
Invariant: a request has one result for each consumer, given once.
"""
