"""Finished requests on their way to the disk.

One thread writes them, in the order in which they finished, while the consumer's thread takes the next frames. Requests
that finish while it waits for the disk are synced together, because a journal commit takes as long for many as for one.
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

# A finished request.
T = TypeVar("T")
# The same request, written.
W = TypeVar("W")

# Bytes that are written before one sync.
_GROUP_BYTES_MAX = 64 * limits.MIB
# Requests under way, however small.
_UNDER_WAY_MAX = 1024


class _Ending(NamedTuple, Generic[T]):
    request: T
    key: str
    nbytes: int
    result: Future[CaptureResult]


class Endings(Generic[T, W]):
    """The thread that writes finished requests, from `open` to `close`.

    write: writes one request. It returns the value that `publish` takes, or a result at once.
    publish: gets written requests onto the disk together, and returns their results in order.

    A request that the disk refuses for now is written again until the disk takes it. That is an exception of the kind
    `retry`, raised by `write` or in the place of a result. Other exceptions go to the request's Future. `close` writes
    each waiting request once more.
    """

    def __init__(
        self,
        write: Callable[[T], W | CaptureResult],
        publish: Callable[[Sequence[W]], Sequence[CaptureResult | BaseException]],
    ) -> None:
        # Why the disk took nothing the last time; None when it took everything. The thread writes it.
        self.trouble: BaseException | None = None
        self._write = write
        self._publish = publish
        # None is the end.
        self._queue: SimpleQueue[_Ending[T] | None] = SimpleQueue()
        # Oldest first; only the consumer's thread uses it.
        self._under_way: deque[_Ending[T]] = deque()
        # The bytes of these; only the consumer's thread uses it.
        self._nbytes = 0
        self._closing = threading.Event()
        # The last pause between tries; only the writing thread uses it.
        self._pause_s = 0.0
        self._thread = threading.Thread(target=self._run, name="capflow-filesystem-endings", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def nbytes(self) -> int:
        """The bytes of rows under way."""
        self._reap()
        return self._nbytes

    def put(self, request: T, key: str, nbytes: int) -> Future[CaptureResult]:
        """Queue a request to be written; return the Future of its result.

        key: names the request for `wait`.
        nbytes: the bytes of its rows.
        """
        self._reap()
        ending = _Ending(request, key, nbytes, Future[CaptureResult]())
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
        """Wait until the requests of a key have results; without a key, until the oldest has.

        Raises RetryError while the disk takes nothing.
        """
        self._reap()
        endings = [ending for ending in self._under_way if key in (None, ending.key)]
        for ending in endings if key is not None else endings[:1]:
            while not ending.result.done():
                if (trouble := self.trouble) is not None:
                    raise RetryError(str(trouble)) from (trouble.__cause__ or trouble)
                wait([ending.result], limits.IDLE_S)

    def close(self) -> None:
        """Give every request its result, or the exception for which it has none, and stop the thread."""
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
        """Move queued requests to `waiting`; block for the first when none waits. Return whether more may come."""
        while more and not (waiting and self._queue.empty()):
            ending = self._queue.get()
            if ending is None:
                return False
            waiting.append(ending)
        return more

    def _begin(self, ending: _Ending[T], group: list[tuple[_Ending[T], W]], again: list[_Ending[T]]) -> None:
        try:
            written = self._write(ending.request)
        except BaseException as e:  # noqa: BLE001  it goes to the request's Future
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
        except BaseException as e:  # noqa: BLE001  it goes to their Futures
            results = [e] * len(group)
        for (ending, _), result in zip(group, results, strict=True):
            if isinstance(result, BaseException):
                self._fail(ending, result, again)
            else:
                ending.result.set_result(result)

    def _fail(self, ending: _Ending[T], error: BaseException, again: list[_Ending[T]]) -> None:
        """Queue a request again if that may help, else give its Future the exception."""
        if kind_of(error) == "retry" and not self._closing.is_set():
            self.trouble = error
            again.append(ending)
        else:
            ending.result.set_exception(error)
