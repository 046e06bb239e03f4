"""Every private name of vLLM that capflow uses.

Only this package imports `vllm.v1` and `vllm.model_executor`; other packages call it.
`surface` lists each name that capflow imports, overrides or replaces, also in other packages.
Invariant: a vLLM without a name that rows need is refused at the start, with one line.
"""
