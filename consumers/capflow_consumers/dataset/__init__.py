"""A captured data set on disk: its layout, how it is read with `capflow.open`, and the values that writer and reader share.

The filesystem consumer, `inspect` and `export` use it. It imports no consumer.
Invariant: a reader sees whole requests only, or rows of a running request that say so; damage is named, never returned.
"""
