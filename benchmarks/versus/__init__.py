"""The parts of `benchmarks/versus.py`: contenders, their environments and processes, the checks, and the report."""
