"""The protocol between peers and a hub: messages, sessions, credit, the row format, and recordings of frames.

The transport drives it and the hub answers it. It owns no socket, no thread and no clock.
Invariant: an unexpected message ends the session that received it and affects no other.
"""
