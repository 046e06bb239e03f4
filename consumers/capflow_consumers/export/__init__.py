"""`capflow export`: a data set in the formats of other tools.

The command line imports `command`.
Invariant: an export that was stopped goes on where it stopped, and a finished one is whole.
"""
