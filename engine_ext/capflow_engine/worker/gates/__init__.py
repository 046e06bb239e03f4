"""The gates of requests, from one step to the next: where they opened, and what latched ones carry.

The worker calls them once a step. They decide nothing about a step that is under way: its taps do.
Invariant: rows that belong to no request open no gate.
"""
