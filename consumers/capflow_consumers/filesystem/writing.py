"""Requests that are over, on their way to the disk.

One thread writes them, in the order in which they ended, while the consumer's goes on with what comes next. Those that came while it waited for the
disk are got onto it together: a journal commit takes as long for many as for one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from capflow import limits
from capflow.capture.result import CaptureResult
from capflow.errors import RetryError, kind_of

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
    once. What the disk refuses for now, as an exception of `write` of the kind `retry` or in the place of a result, is written again until it takes it; other
    exceptions are in the Futures. At `close` each that waits is written once more.
    """

    def __init__(
        self,
        write: Callable[[T], W | CaptureResult],
        publish: Callable[[Sequence[W]], Sequence[CaptureResult | BaseException]],
    ) -> None:
        # Why the disk took nothing, the last time; written by the thread.
        self.trouble: BaseException | None = None
        self._write = write
        self._publish = publish
        # None: that was all.
        self._queue: SimpleQueue[_Ending[T] | None] = SimpleQueue()
        # Oldest first; the consumer's thread's.
        self._under_way: deque[_Ending[T]] = deque()
        # Of these.
        self._nbytes = 0
        self._closing = threading.Event()
        # The last one; the thread's.
        self._pause_s = 0.0
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
        ending = _Ending(what, key, nbytes, Future[CaptureResult]())
        self._under_way.append(ending)
        self._nbytes += nbytes
        self._queue.put(ending)
        return ending.result

    def make_room(self) -> None:
        """Wait until one more request may be under way. Raises RetryError while the disk takes nothing."""
        self._reap()
        if len(self._under_way) >= _UNDER_WAY_MAX:
            self.wait()

    def wait(self, key: str | None = None) -> None:
        """Wait for the requests of a key, or for the oldest, to have results. Raises RetryError while the disk takes nothing."""
        self._reap()
        found = [ending for ending in self._under_way if key in (None, ending.key)]
        for ending in found if key is not None else found[:1]:
            while not ending.result.done():
                if (trouble := self.trouble) is not None:
                    raise RetryError(str(trouble)) from (trouble.__cause__ or trouble)
                wait([ending.result], limits.IDLE_S)

    def close(self) -> None:
        """Have every request get its result, or the exception for which it has none."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._reap()

    def _reap(self) -> None:
        while self._under_way and self._under_way[0].result.done():
            self._nbytes -= self._under_way.popleft().nbytes

    def _run(self) -> None:
        more, waiting = True, deque[_Ending[T]]()
        while more or waiting:
            more = self._fetch(waiting, more=more)
            group: list[tuple[_Ending[T], W]] = []
            again: list[_Ending[T]] = []
            nbytes = 0
            while waiting and nbytes < _GROUP_BYTES_MAX and not again:
                ending = waiting.popleft()
                nbytes += ending.nbytes
                self._begin(ending, group, again)
            self._publish_all(group, again)
            waiting.extendleft(reversed(again))
            if again:
                self._pause_s = min(max(2 * self._pause_s, limits.RETRY_S_MIN), limits.RETRY_S_MAX)
                self._closing.wait(self._pause_s)
            else:
                self.trouble, self._pause_s = None, 0.0

    def _fetch(self, waiting: deque[_Ending[T]], *, more: bool) -> bool:
        """Take what came, waiting for the first where nothing waits; return whether more may come."""
        while more and not (waiting and self._queue.empty()):
            ending = self._queue.get()
            if ending is None:
                return False
            waiting.append(ending)
        return more

    def _begin(self, ending: _Ending[T], group: list[tuple[_Ending[T], W]], again: list[_Ending[T]]) -> None:
        try:
            written = self._write(ending.what)
        except BaseException as e:  # noqa: BLE001  it is the request's
            self._fail(ending, e, again)
            return
        if isinstance(written, CaptureResult):
            ending.result.set_result(written)
        else:
            group.append((ending, written))

    def _publish_all(self, group: Sequence[tuple[_Ending[T], W]], again: list[_Ending[T]]) -> None:
        if not group:
            return
        try:
            results = self._publish([written for _, written in group])
        except BaseException as e:  # noqa: BLE001  it is theirs
            results = [e] * len(group)
        for (ending, _), result in zip(group, results, strict=True):
            if isinstance(result, BaseException):
                self._fail(ending, result, again)
            else:
                ending.result.set_result(result)

    def _fail(self, ending: _Ending[T], error: BaseException, again: list[_Ending[T]]) -> None:
        """Have a request written again if that may work, else let its Future have the exception."""
        if kind_of(error) == "retry" and not self._closing.is_set():
            self.trouble = error
            again.append(ending)
        else:
            ending.result.set_exception(error)
