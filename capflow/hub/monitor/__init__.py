"""The monitor: Prometheus metrics and health of a hub over HTTP.

The command line starts it beside a hub. It reads counters and changes nothing.
Invariant: a request for metrics never blocks the hub's thread.
"""
