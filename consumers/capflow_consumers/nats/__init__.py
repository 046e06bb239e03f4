"""The nats consumer: publishes scores, the places of rows, and results to a NATS JetStream stream.

The plugin loader imports `consumer`.
Invariant: every message has an id by which the server drops a duplicate.
"""
