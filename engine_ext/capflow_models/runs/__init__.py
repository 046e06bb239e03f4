"""What experiments, sweeps and rollouts share: an engine of their own, the lines that they read, what they write.

Its callers are their packages and the jobs. Nothing here knows what is measured.
Invariant: a directory of results has no file that is half written.
"""
