"""What to capture and the captured data: sites, positions, specs, frames, results and losses.

Every other package may import these values. They import no socket, no thread and no plugin.
Invariant: a value from outside is checked when it is decoded, so an invalid one never exists.
"""
