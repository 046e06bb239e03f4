"""A hub with the filesystem consumer and its inbox, which serves until standard input ends and its engines are gone.

Run as `leaving.py ADDRESS DIRECTORY LAYERS POINT`: the inbox lies in DIRECTORY/spool, and its process kills itself at
POINT of the removal of the inbox; see `spool.py`.
"""

import os
import signal
import sys
from pathlib import Path

from capflow.hub.hub import Hub
from capflow.plugins.configure import configure, load_plugins
from tests.kit.processes.spool import Killed
from tests.kit.waiting import eventually


class KilledAtRemoval(Killed):
    """Kills the process at a point of a directory's removal: before it, or when this many of its files are gone."""

    def remove(self, path, names):
        self.reach("before-remove")
        if self.point == "during-remove":
            for file in [path / name for name in names if (path / name).exists()][: self.after]:
                file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        super().remove(path, names)


def main():
    address, directory, layers, point, after = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    options = {"root": str(directory / f"rows-{layers}"), "layers": layers, "fsync": False}
    hub = Hub(address, [configure("filesystem", options | {"spool_dir": str(directory / "spool")}, load_plugins())])
    hub.lanes[0].inbox._files = KilledAtRemoval(point, int(after))
    hub.start()
    print("started", flush=True)
    sys.stdin.read()
    eventually(lambda: not hub.roster.peers)  # else it keeps the inbox for an engine whose Bye is on its way
    hub.stop()


if __name__ == "__main__":
    main()
