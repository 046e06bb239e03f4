"""`capflow features`: the active features of the rows of a captured data set.

It reads data sets and writes one Parquet file; the command line calls it.
Invariant: the file is complete or not there.
"""
