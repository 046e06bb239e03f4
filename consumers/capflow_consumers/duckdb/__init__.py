"""The duckdb consumer: what every token scores on probes, in one DuckDB file, and `capflow query`.

The plugin loader imports `consumer`, the command line `command`.
Invariant: rows of one frame are committed together with its number, so a frame that comes again adds nothing.
"""
