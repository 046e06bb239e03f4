"""The work of commands that need an engine, each in a child process: model jobs, trials, checks, and the demo model.

`capflow.cli` starts them with `python -m`; they answer one JSON object a line.
Invariant: nothing else is written to standard output.
"""
