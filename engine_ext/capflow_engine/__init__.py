"""The engine extension: capflow inside vLLM's processes.

vLLM imports it by the names in `settings`. `capflow.LLM`, `capflow serve` and the command line's jobs import it too.
It reaches hubs only through `capflow.transport`.
Invariant: a request that asks nothing of capflow computes what plain vLLM computes.
"""
