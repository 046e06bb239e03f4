"""Views beyond one live request: exports, and what an engine's requests have in common.

The server and the board call them; they keep only what they are given, in bounded memory.
Invariant: they send nothing, and they write no record.
"""
