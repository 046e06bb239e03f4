"""The shards of layout `sharded`: the stream that is written, its seal as a Parquet file, recovery, and reading.

The filesystem consumer writes them and the data set reads them.
Invariant: a request is part of a shard once its commit is written whole.
"""
