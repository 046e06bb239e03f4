"""A thousand workers and eight hubs on one machine: what a hub can take, and that nothing is lost when one dies.

The hubs are the real ones, each in a process of its own, and so are the sockets and the sessions. The workers are
synthetic: they have the session of a worker and no engine. `python -m tests.fleet` runs it, `make simulate-fleet` at
its full size. It may call anything; nothing else imports it but its test.
"""
