"""The lanes: each consumer's queue and thread, in memory or through an inbox on disk.

The hub offers rows to a lane and takes results from it; a lane never calls the hub's other parts.
Invariant: a consumer that is slow, fails or hangs delays no other consumer, and rows on disk outlive the process.
"""
