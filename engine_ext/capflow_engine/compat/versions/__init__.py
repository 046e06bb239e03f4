"""Which versions of vLLM capflow works with: the table of its names, the comparison with a vLLM, and what tests found.

`compat.engine` asks it at the start of every process; `tests.matrix` writes the record.
Invariant: nothing here imports vLLM.
"""
