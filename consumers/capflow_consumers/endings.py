"""Requests that are over, on their way to the disk.

One thread writes them, in the order in which they ended, while the consumer's goes on with what comes next. Those that came while it waited for the
disk are got onto it together: a journal commit takes as long for many as for one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from capflow import limits
from capflow.result import CaptureResult

T = TypeVar("T")  # a request that is over
W = TypeVar("W")  # the same, written

_GROUP_BYTES_MAX = 64 * limits.MIB  # that are written before what is written is got onto the disk
_UNDER_WAY_MAX = 1024  # requests, however small


class _Ending(NamedTuple, Generic[T]):
    what: T
    key: str
    nbytes: int
    result: Future[CaptureResult]


class Endings(Generic[T, W]):
    """The thread, from `open` to `close`.

    write(what) writes one and returns what `publish` is given, with others, to get onto the disk and to return their results in order; or a result at
    once. An exception of either is in the Futures.
    """

    def __init__(
        self, write: Callable[[T], W | CaptureResult], publish: Callable[[Sequence[W]], Sequence[CaptureResult]]
    ) -> None:
        self._write = write
        self._publish = publish
        self._queue: SimpleQueue[_Ending[T] | None] = SimpleQueue()  # None: that was all
        self._under_way: deque[_Ending[T]] = deque()  # oldest first; the consumer's thread's
        self._nbytes = 0  # of these
        self._thread = threading.Thread(target=self._run, name="capflow-filesystem-endings", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """The bytes of rows that are under way."""
        self._reap()
        return self._nbytes

    def put(self, what: T, key: str, nbytes: int) -> Future[CaptureResult]:
        """Begin to write a request; return what becomes of it."""
        self._reap()
        if len(self._under_way) >= _UNDER_WAY_MAX:
            self.wait()
        ending = _Ending(what, key, nbytes, Future[CaptureResult]())
        self._under_way.append(ending)
        self._nbytes += nbytes
        self._queue.put(ending)
        return ending.result

    def wait(self, key: str | None = None) -> None:
        """Wait for the requests of a key, or for the oldest, to have results."""
        self._reap()
        found = [ending for ending in self._under_way if key in (None, ending.key)]
        for ending in found if key is not None else found[:1]:
            ending.result.exception()

    def close(self) -> None:
        """Have every request get its result."""
        self._queue.put(None)
        self._thread.join()
        self._reap()

    def _reap(self) -> None:
        while self._under_way and self._under_way[0].result.done():
            self._nbytes -= self._under_way.popleft().nbytes

    def _run(self) -> None:
        more = True
        while more:
            group: list[tuple[Future[CaptureResult], W]] = []
            nbytes = 0
            while more and nbytes < _GROUP_BYTES_MAX and not (group and self._queue.empty()):
                ending = self._queue.get()
                more = ending is not None
                if ending is not None:
                    nbytes += ending.nbytes
                    self._begin(ending, group)
            self._publish_all(group)

    def _begin(self, ending: _Ending[T], group: list[tuple[Future[CaptureResult], W]]) -> None:
        try:
            written = self._write(ending.what)
        except BaseException as e:  # noqa: BLE001  it is the request's
            ending.result.set_exception(e)
            return
        if isinstance(written, CaptureResult):
            ending.result.set_result(written)
        else:
            group.append((ending.result, written))

    def _publish_all(self, group: Sequence[tuple[Future[CaptureResult], W]]) -> None:
        if not group:
            return
        try:
            results = self._publish([written for _, written in group])
        except BaseException as e:  # noqa: BLE001  it is theirs
            for future, _ in group:
                future.set_exception(e)
            return
        for (future, _), result in zip(group, results, strict=True):
            future.set_result(result)
