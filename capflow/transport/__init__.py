"""The sockets, and the threads that drive sessions over them.

Nothing else in capflow imports zmq. The engine, the hub and the command line connect through it.
Invariant: every socket and every link has one thread that uses it; other threads only wake that thread.
"""
