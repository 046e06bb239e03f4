"""Lenses on the page: which tokens the rows of a token would predict if the model ended at their layer.

`capflow.lenses` says what a lens is: the logit lens, or that of a file. `rows` keeps the newest rows, `desk` answers
pages, and `job` is the process that computes. The page's server calls `desk`. Nothing here downloads a file, or imports
a library of models.
Invariant: at most one process computes, within limits of memory and time, and it ends when the page's process does.
"""
