"""The commands that run a model: `run`, `record`, `serve`, `rollouts` and `vectors`.

`capflow.cli` imports each command when it is run. The engine runs in a child process.
Invariant: a signal or an error ends the child process too.
"""
