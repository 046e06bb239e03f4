"""A captured data set on disk: its layout, how `capflow.open` reads it, and the values that writer and reader share.

The filesystem consumer, `inspect` and `export` use it. It imports no consumer.
Invariant: a reader sees whole requests, or rows that are marked as those of a running request. Damage is reported,
never returned as rows.
"""
