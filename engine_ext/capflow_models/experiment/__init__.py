"""`capflow experiment`: arms that steer in different ways, run on the same prompts and seeds, measured and compared.

`file` reads a description, `schedule` makes its cells, `session` runs them on one engine, `records` keeps them,
`metrics` and `statistics` compare the arms, `report` draws. The command line starts `program`.
Invariant: a cell (arm, sweep point, prompt, seed) that is in the output is never run again, and never with other
settings.
"""
