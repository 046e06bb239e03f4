"""The plugin contract, and how configured consumers and controllers come from what a user writes.

The hub, the engine and the command line load plugins here; plugin packages import `capflow` only.
Invariant: an unknown option, a duplicate name or a wrong type stops the start with one line.
"""
