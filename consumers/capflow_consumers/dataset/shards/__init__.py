"""The shards of layout `sharded`: the stream while one is written, its seal as a Parquet file, recovery, and reading.

The filesystem consumer writes them and the data set reads them.
Invariant: a request is part of a shard when its commit is written whole.
"""
