"""A data set in an object store: its address, its objects, and its shards as they are read there.

The reader opens it, and the filesystem consumer uploads sealed shards to it. pyarrow's S3 client does the requests.
Invariant: a shard is in the store whole or not at all, and no object is ever replaced by another one.
"""
