"""The filesystem consumer: each request's rows in files of its own, or in shards with others.

The plugin loader imports `consumer`. It writes the formats of `capflow_consumers.dataset`.
Invariant: a request's files appear in the data set whole, or not at all.
"""
