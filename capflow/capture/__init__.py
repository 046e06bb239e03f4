"""What to capture and what a capture is: sites, positions, specs, frames, results and losses.

Every other package may import these values; they import no socket, no thread and no plugin.
Invariant: a value from outside is checked when it is decoded, so an invalid one never exists.
"""
