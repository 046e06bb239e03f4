"""The uploads of one consumer: the process that does them, the shards that wait for it, and its failures.

Invariant: a shard's local file is removed only after the store has the shard and it was compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from capflow import limits
from capflow.errors import CapflowError, RetryError, explain
from capflow.plugins.consumer import Backlog
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.objects.address import ObjectRoot
from capflow_consumers.filesystem.uploader import UploadEvent

logger = logging.getLogger("capflow.consumer")

# A process that says nothing for so long, in the middle of an upload, is replaced.
_SILENCE_S = 300.0
# At the end: for so long a store that fails is tried again.
_FAILING_S = 3.0
# What is left of the hub's time when the consumer stops waiting.
_MARGIN_S = 1.0
_TURN_S = 0.2


class Uploads:
    """The uploads of the shards in a directory, from `open` to `close`.

    uploaded: called with the name of each shard that the store has, on a thread of this object.
    bytes_max: how many bytes of shards may wait.
    """

    def __init__(self, directory: Path, root: ObjectRoot, uploaded: Callable[[str], None], bytes_max: int) -> None:
        self._directory = directory
        self._root = root
        self._uploaded = uploaded
        self._bytes_max = bytes_max
        # Shards in the directory, and their bytes. It is replaced as a whole.
        self._waiting = (0, 0)
        # Why the last upload failed; None when it did not. Replaced as a whole.
        self._failed: UploadEvent | None = None
        self._failed_since = 0.0
        self._logged_at = 0.0
        # Whether an upload is under way, and when something was last heard of it.
        self._busy = False
        self._heard_at = 0.0
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder = msgspec.json.Decoder(UploadEvent)
        self._thread = threading.Thread(target=self._run, name="capflow-filesystem-uploads", daemon=True)

    def open(self) -> None:
        """Start the process, which begins with what waits."""
        self._count()
        self._thread.start()

    def wake(self) -> None:
        """Have the process look for new shards."""
        self._count()
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, and the next one looks by itself
                process.stdin.write(b"\n")

    @property
    def backlog(self) -> Backlog:
        """What waits, and why it cannot be uploaded now."""
        failed = self._failed
        return Backlog(*self._waiting, "" if failed is None else f"uploads fail and are tried again: {failed.code}")

    def check_room(self) -> None:
        """Raise RetryError while too much waits."""
        count, nbytes = self._waiting
        if nbytes <= self._bytes_max:
            return
        failed = self._failed
        got = f"{count} shards of {nbytes} bytes that wait to be uploaded"
        do = "rows wait" if failed is None else f"rows wait; the last upload failed: {failed.error}"
        raise RetryError(explain(str(self._root), got=got, expected=f"at most {self._bytes_max}", do=do))

    def close(self, left_s: Callable[[], float | None], working: Callable[[], None]) -> None:
        """Upload what waits, as long as a hub that stops waits, and end the process.

        Raises CapflowError when the hub stops and something is left.
        """
        self.wake()
        failing_since = time.monotonic()
        stops = left_s() is not None
        while self._waiting[0] and (left_s() or 0.0) > _MARGIN_S:
            if self._failed is None:
                failing_since = time.monotonic()
            elif time.monotonic() - failing_since > _FAILING_S:
                break
            working()
            self._closing.wait(_TURN_S)
            self._count()
        self._closing.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()
        self._count()
        if stops and (count := self._waiting[0]):
            got = f"{count} shards of {self._waiting[1]} bytes that are not uploaded"
            why = "" if self._failed is None else f" The last upload failed: {self._failed.error}"
            do = f"they are kept in {self._directory}, and the next hub with this root uploads them.{why}"
            raise CapflowError(explain(str(self._root), got=got, do=do))

    def _count(self) -> None:
        sizes = []
        for path in self._directory.glob(layout.SHARD_PATTERN):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        self._waiting = len(sizes), sum(sizes)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.is_set():
            try:
                why = f"the uploader ended with code {self._live()}"
            except OSError as e:
                why = f"the uploader cannot be started: {e.strerror or e}"
            if self._closing.is_set():
                return
            if self._failed is None:
                self._fail(UploadEvent("failed", error=why, code="no uploader"))
            pause_s = min(max(2 * pause_s, limits.RETRY_S_MIN), limits.RETRY_S_MAX)
            self._closing.wait(pause_s)

    def _live(self) -> int:
        """Run a process to its end; return its exit code."""
        command = [sys.executable, "-P", "-m", "capflow_consumers.filesystem.uploader"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # It has a session of its own, so that a Ctrl-C for this process does not end it first.
        process = subprocess.Popen(
            [*command, str(self._directory), str(self._root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
        self._process = process
        if self._closing.is_set():
            process.kill()
        with process:
            assert process.stdout is not None
            self._busy, self._heard_at = False, time.monotonic()
            text = b""
            while True:
                if not select.select([process.stdout], [], [], 1.0)[0]:
                    if self._busy and time.monotonic() - self._heard_at > _SILENCE_S:
                        process.kill()
                    continue
                data = process.stdout.read(65536)
                if not data:
                    break
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self._hear(self._decoder.decode(line))
        return process.returncode

    def _hear(self, event: UploadEvent) -> None:
        self._heard_at = time.monotonic()
        self._busy = event.kind in ("begun", "part")
        if event.kind == "failed":
            self._fail(event)
        elif event.kind == "uploaded":
            if self._failed is not None:
                took = time.monotonic() - self._failed_since
                logger.warning("uploads to %s work again after %.1f s", self._root.path, took)
            self._failed = None
            if (self._directory / event.name).exists():
                logger.info("%s/%s is uploaded, %d bytes", self._root.path, event.name, event.nbytes)
            self._uploaded(event.name)
            self._count()

    def _fail(self, event: UploadEvent) -> None:
        now = time.monotonic()
        before, self._failed = self._failed, event
        if before is None:
            self._failed_since = now
        if before is None or before.code != event.code or now - self._logged_at > limits.RETRY_LOGGED_S:
            self._logged_at = now
            count, nbytes = self._waiting
            text = "an upload fails and is tried again; %d shards of %d bytes wait: %s"
            logger.warning(text, count, nbytes, event.error)
