"""Every private name of vLLM that capflow uses.

Only this package imports `vllm.v1` and `vllm.model_executor`; other packages call it.
Invariant: a vLLM of a version outside the tested range is refused at the start, with one line.
"""
