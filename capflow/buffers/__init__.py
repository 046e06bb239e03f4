"""Bounded holders: the byte queue between two threads, the spool on disk, and shares of a bound between owners.

Any package may use them. They know the bounds in `capflow.limits`, but no captures, peers or hubs.
Invariant: each has a bound in bytes or items, and documents what it discards or refuses at the bound.
"""
