"""`capflow inspect`: describes a data set, checks it, and draws its norms.

The command line imports `command`. It reads the data set and writes only the picture.
Invariant: damage in one capture does not hide another.
"""
