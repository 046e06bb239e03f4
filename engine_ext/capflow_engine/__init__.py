"""The engine extension: capflow inside vLLM's processes.

vLLM imports it by name (`settings` says how), and so do `capflow.LLM`, `capflow serve` and the jobs of the command line.
It knows no hub but through `capflow.transport`.
Invariant: a request that asks nothing of capflow computes what plain vLLM computes.
"""
