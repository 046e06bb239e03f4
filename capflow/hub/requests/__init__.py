"""The requests of a hub: which run, what each consumer wants of them, and the result that each consumer gave.

Only the hub writes to them, on its own thread; a durable lane has an index of its own, of what it reads from its inbox.
Invariant: a request has one result for each consumer, given once.
"""
