"""The results of an experiment: statistics over its cells, tables, pictures and the report.

`program` calls it after the cells are there; nothing here starts an engine.
Invariant: the same cells give the same results.
"""
