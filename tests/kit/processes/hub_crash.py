"""A hub with the filesystem consumer and its inbox, which kills itself at a named point of the inbox's spool.

Run as `hub_crash.py ADDRESS DIRECTORY POINT AFTER LAYOUT`, see `spool.py`; it stops cleanly when standard input ends.
"""

import sys
from pathlib import Path

from capflow.hub.hub import Hub
from capflow.plugins.configure import configure, load_plugins
from tests.kit.processes.spool import Killed

INBOX_BYTES = 4 * 1024 * 1024  # so that segments are short, and no request too long


def hub_options(directory, layout):
    """Return the options of the consumer, whose data and inbox lie below a directory."""
    return {
        "root": str(directory / "rows"),
        "layout": layout,
        "on_collision": "suffix",
        "policy": "spill",
        "spool_bytes": INBOX_BYTES,
        "spool_dir": str(directory / "spool"),
    }


def main():
    address, directory, point, after = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    consumer = configure("filesystem", hub_options(directory, sys.argv[5]), load_plugins())
    hub = Hub(address, [consumer])
    hub.lanes[0].inbox._files = Killed(point, after)
    hub.start()
    sys.stdin.read()
    hub.stop()


if __name__ == "__main__":
    main()
