"""The peers of a hub: who is connected, what each may do, how much memory each may fill, and whose turn it is.

Only the hub calls them, on its own thread.
Invariant: no peer takes another's share of memory, time or log lines.
"""
