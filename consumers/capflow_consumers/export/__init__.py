"""`capflow export`: writes a data set in the formats of other tools.

The command line imports `command`.
Invariant: an export that was stopped continues where it stopped; every file under its final name is whole.
"""
