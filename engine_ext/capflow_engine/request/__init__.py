"""What one request asks: its options in `extra_args`, how far it reaches, beams, and what steers it while it runs.

The scheduler, the server and `capflow.LLM` parse with it.
Invariant: a request is refused before it runs, or runs as it was asked.
"""
