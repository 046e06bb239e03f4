"""Sweeps: one change of the model at each chosen hook, layer and position, each measured at the next token.

`pairs` reads prompts, `plan` makes the runs, `session` computes them on one engine, `records` keeps them, `results`
compares and draws them. Users import `capflow_models.sweep_patch`; the command line starts `program`.
Invariant: a run (pair, direction, site, position) that is in the output is never computed again, and never with other
settings.
"""
