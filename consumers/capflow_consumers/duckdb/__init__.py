"""The duckdb consumer: stores the score of every token on every probe in one DuckDB file. `capflow query` reads it.

The plugin loader imports `consumer`, the command line `command`.
Invariant: the rows of a frame are committed together with its number, so a frame that is delivered again adds nothing.
"""
