"""The process that uploads the sealed shards of a directory to an object store.

    python -P -m capflow_consumers.filesystem.uploader DIRECTORY URL

It looks for shards at the start and for each line on its standard input, and ends when that ends. It writes each
`UploadEvent` as a line of JSON to its standard output. The process that started it removes what is uploaded.

It is a process of its own because pyarrow cannot give up an upload: closing or freeing one completes it, also half of a
shard, and the end of Python waits for it. Killing the process never completes an upload.

Invariant: a shard is uploaded by one process at a time, under its own name. No object is replaced.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from capflow import limits
from capflow.errors import CapflowError, explain
from capflow.files import open_regular
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.objects.address import parse
from capflow_consumers.dataset.objects.store import BrokenUploadError, Objects, StoreError, stored_of

_BUSY_S = 1.0


class UploadEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to a shard.

    kind: `begun`; `part`, after so many bytes more; `uploaded`: the store has it, which was checked; `failed`.
    name: of the shard; empty where the failure is of none.
    error: why it failed; for the log.
    code: the same without names.
    """

    kind: Literal["begun", "part", "uploaded", "failed"]
    name: str = ""
    nbytes: int = 0
    error: str = ""
    code: str = ""


class Uploader:
    """Uploads the shards of a directory, one after another."""

    def __init__(self, directory: Path, objects: Objects) -> None:
        self._directory = directory
        self._objects = objects
        self._encoder = msgspec.json.Encoder()

    def run(self, wake: threading.Event) -> None:
        """Upload what there is, and again after each wake, or after a pause where something failed."""
        pause_s = 0.0
        while True:
            wake.clear()
            failed, busy = self._round()
            pause_s = min(max(2 * pause_s, limits.RETRY_S_MIN), limits.RETRY_S_MAX) if failed else 0.0
            wake.wait(pause_s or (_BUSY_S if busy else None))

    def _round(self) -> tuple[bool, bool]:
        """Upload the shards; return whether one failed, and whether another process uploads one."""
        busy = False
        for path in sorted(self._directory.glob(layout.SHARD_PATTERN)):
            try:
                busy |= not self._upload(path)
            except StoreError as e:
                self._tell(UploadEvent("failed", path.name, error=str(e), code=e.code))
                if isinstance(e, BrokenUploadError):
                    os._exit(1)
                return True, busy
            except OSError as e:
                error = explain(str(path), got=e.strerror or str(e), expected="a shard that can be read")
                self._tell(UploadEvent("failed", path.name, error=error, code=os.strerror(e.errno or 0)))
                return True, busy
        return False, busy

    def _upload(self, path: Path) -> bool:
        """Upload a shard; return False when another process does. Raises StoreError and OSError."""
        try:
            file = os.fdopen(open_regular(path), "rb")
        except FileNotFoundError:  # another process has done it
            return True
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if os.path.lexists(path):
                self._tell(UploadEvent("begun", path.name))
                self._put(path.name, file)
                self._tell(UploadEvent("uploaded", path.name, os.fstat(file.fileno()).st_size))
        return True

    def _put(self, name: str, file: BinaryIO) -> None:
        """Put a shard in the store, unless a writer that was killed has done it, and check it there."""

        def on_part(nbytes: int) -> None:
            self._tell(UploadEvent("part", name, nbytes))

        objects = self._objects
        path = objects.root.path / name
        if objects.has(name):
            if not objects.is_here(name, stored_of(file), on_part):
                got, do = "an object with other content", "compare it with the local one, and remove one"
                raise StoreError(explain(str(path), got=got, do=do), "OBJECT_DIFFERS")
            return
        stored = objects.put(name, file, on_part)
        if not objects.is_here(name, stored, on_part):
            objects.remove(name)
            got = "other content than was uploaded, which was removed"
            raise StoreError(explain(str(path), got=got), "OBJECT_DIFFERS")

    def _tell(self, event: UploadEvent) -> None:
        text = memoryview(self._encoder.encode(event) + b"\n")
        while text:
            text = text[os.write(1, text) :]


def _listen(wake: threading.Event) -> None:
    """Wake the uploader for each line; end the process with the lines."""
    while os.read(0, 4096):
        wake.set()
    os._exit(0)


def main(directory: str, url: str) -> None:
    """Upload until the standard input ends."""
    wake = threading.Event()
    threading.Thread(target=_listen, args=(wake,), daemon=True).start()
    uploader = Uploader(Path(directory), Objects(parse(url, "root")))
    try:
        uploader.run(wake)
    except BrokenPipeError:  # the hub is gone
        os._exit(0)
    except CapflowError as e:
        os.write(1, msgspec.json.encode(UploadEvent("failed", error=str(e), code=type(e).__name__)) + b"\n")
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
