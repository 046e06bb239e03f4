"""The Triton kernels of a tap: they copy rows, score and steer as the tables say, inside CUDA graphs.

The custom op calls them on a GPU, and nothing else does. They know no requests.
Invariant: they read tables that never move, so a graph that is captured once serves every later plan.
"""
