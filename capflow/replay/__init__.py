"""Replay: a recording or a data set, given to a hub as if engines were live.

The command line and tests play it. It imports the hub, and nothing imports it but these.
Invariant: consumers cannot tell a replayed frame from a live one by its content.
"""
