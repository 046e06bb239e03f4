"""Bounded holders: the byte queue between two threads, the spool on disk, and shares of a bound between owners.

Any package may use them; they know nothing of captures, peers or hubs, but for the bounds in `capflow.limits`.
Invariant: each has a bound in bytes or in items, and says what it gives up when the bound is reached.
"""
