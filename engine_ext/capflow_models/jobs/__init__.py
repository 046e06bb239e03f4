"""The programs behind `capflow vectors fit` and `capflow rollouts`, and the end that every program here has.

The command line becomes one of them; each takes one argument, its job as JSON.
Invariant: an error is one line on standard error, with the command line's exit codes.
"""
