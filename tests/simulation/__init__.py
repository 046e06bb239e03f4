"""A deterministic simulation: the hub's own code on virtual time, threads, sockets and disks, driven by one seed.

| file | holds |
|---|---|
| `scheduler` | virtual time, and tasks that run one at a time, in an order that the seed chooses |
| `threads` | `threading`, `time`, `queue` and what else the product waits with, on a scheduler |
| `network` | the two ends of a connection, on a scheduler |
| `volume` | disks that keep what was synced |
| `consumers` | models of consumers, and DuckDB's own on a database in memory |
| `engine` | honest workers |
| `hostile` | peers that keep to the message format and to nothing else |
| `bounds` | the bounds that peers share |
| `oracle` | what honest workers sent, and what must be true of it at the end |
| `run` | one seed: who takes part, which faults occur, and the checks |

`python -m tests.simulation` runs seeds; `--seed N` runs one and prints its trace.
"""
