"""Alerts: the rules of a user, what of them holds for each engine now, and the latest changes.

The channel's reader writes rows and ends of requests, the server evaluates once a second and its pages read. It does no
I/O but to read files of rules.
Invariant: its memory is bounded by the rules and the connected engines, whatever the rows are.
"""
