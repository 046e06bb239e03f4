"""The nats consumer: scores, locations of rows, and results, in a NATS JetStream stream.

The plugin loader imports `consumer`.
Invariant: every message has an id that the stream uses to drop duplicates.
"""
