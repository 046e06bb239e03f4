"""Rows and steering of real vLLM on a GPU, held against Transformers: `python -m tests.gpu`.

Each mode runs in a process of its own, on a tiny random model that is made on the spot. The oracle of `tests.kit` sends
random requests that are chunked, preempted, cached, aborted and steered, and holds every row and every token against
what Transformers computes in float64. Without a GPU, the modes that run on a CPU do so.
"""
