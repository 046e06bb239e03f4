"""Every private name of vLLM that capflow uses.

Only this package imports `vllm.v1` and `vllm.model_executor`; other packages ask it.
Invariant: a vLLM in which a name is missing is refused at the start, with one line.
"""
