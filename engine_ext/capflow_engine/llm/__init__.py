"""vLLM's offline and asyncio engines with capture and steering, and how results are asked of the hubs.

Users import `capflow.LLM` and `capflow.AsyncLLM`; the server shares the results.
Invariant: an answer that vLLM gives is returned unchanged, with results beside it.
"""
