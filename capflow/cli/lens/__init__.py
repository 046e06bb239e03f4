"""`capflow lens`: fits lenses, converts published ones, and reads data sets with them.

`command` has the options. `reading` reads a data set, `table` prints what it reads, and `output` writes it as Parquet
or to DuckDB.
Invariant: a data set is read a few hundred rows at a time.
"""
