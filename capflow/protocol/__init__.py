"""The protocol between peers and a hub: messages, sessions, credit, the row format, and recordings of frames.

The transport drives it and the hub answers it. It owns no socket, no thread and no clock.
Invariant: a message that a session does not expect ends that session, and costs nobody else anything.
"""
