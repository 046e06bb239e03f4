"""The commands that look at a model or a machine: `sites` and `doctor`.

`capflow.cli` imports each command when it is run. The engine's part runs in a child process.
Invariant: they change nothing.
"""
