"""A hub for tests: the real hub with lanes, index and sessions, without the workers' sockets.

    with MemoryHub(Loudest(config)) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])        # request r1, 4 tokens of prompt, positions 0 to 3
        engine.finish("r1")
        assert hub.result("r1").status == "ok"

Rows are `row_of(request, site, position)`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from capflow.capture.frame import Dropped, Frame, Rank, rows_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import Capture
from capflow.errors import CapflowError, explain
from capflow.hub.hub import Hub
from capflow.hub.lanes.lane import Lane
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.protocol.message import Act, Hello
from capflow.replay.peer import LocalPeer
from capflow.steering.action import Action, ActionApplied, Outcome
from capflow.testing.frames import BOOT, FIRST, make_finished, make_frame, make_hello
from capflow.transport.address import private_address

T = TypeVar("T")

WAIT_S = 20.0
"""The longest wait in seconds for an answer of the hub."""

_POLL_S = 0.002


class MemoryHub:
    """A hub with these consumers that runs inside a `with` block.

    consumers: each as it is, or with a queue of its own, `ConfiguredConsumer.of(…)`.
    """

    def __init__(self, *consumers: Consumer | ConfiguredConsumer) -> None:
        made = [c if isinstance(c, ConfiguredConsumer) else ConfiguredConsumer.of(c) for c in consumers]
        self.hub = Hub(private_address("testing"), made)
        # At the end: whether the consumers handled all frames and closed in time.
        self.drained: bool | None = None

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lane of each consumer, with its counters: `errors`, `rows`, `dropped`, `counts` and more."""
        return self.hub.lanes

    def engine(
        self,
        name: str = "engine-1",
        *,
        model: ModelInfo | None = None,
        boot: str = BOOT,
        stage: int = 0,
        replica: int = 0,
        sites: Iterable[Site | tuple[int, str]] | None = None,
        capture: Capture | None = None,
        seq: int = 0,
    ) -> Engine:
        """Return a connected engine, or one pipeline stage or replica of it.

        Raises CapflowError if the hub refuses it, because a consumer asks for a site that the model lacks.

        sites: the sites of its frames; by default all sites of the model.
        capture: the spec of each of its requests.
        seq: the number of the last frame of this boot that an earlier hub received.
        """
        hello = make_hello(name, boot, rank=Rank(stage, replica, 0), model=model)
        return Engine(self, hello, sites, capture, seq)

    def results(self, request: str, engine: str = "") -> dict[str, CaptureResult]:
        """Return a request's results by consumer, when all consumers are done with it.

        Raises CapflowError if that takes longer than `WAIT_S`.

        engine: the name of the request's engine; by default the newest request with the id.
        """

        def ask() -> tuple[dict[str, CaptureResult], bool] | None:
            index = self.hub.index
            named = index.named(request, engine)
            return index.results_of(named[-1]) if named else None

        deadline = time.monotonic() + WAIT_S
        while True:
            answer = self.asked(ask)
            if answer is not None and answer[1]:
                return answer[0]
            if time.monotonic() >= deadline:
                raise CapflowError(explain(f"request {request}", got=answer, expected=f"results in {WAIT_S:g} s"))
            time.sleep(_POLL_S)

    def result(self, request: str, engine: str = "") -> CaptureResult:
        """Return a request's result of the first consumer.

        engine: as in `results`.
        """
        return self.results(request, engine)[self.hub.consumers[0].name]

    def asked(self, question: Callable[[], T]) -> T:
        """Call `question` on the hub's thread, after all messages sent before, and return its answer."""
        answers: list[T] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                answers.append(question())
            finally:
                answered.set()

        self.hub.post(ask)
        if not answered.wait(WAIT_S):
            raise CapflowError(explain("the hub", got="no answer", expected=f"one in {WAIT_S:g} s"))
        return answers[0]

    def stop(self, drain_s: float = WAIT_S) -> bool:
        """Stop the hub; return whether the consumers handled all frames and closed in time."""
        if self.drained is None:
            self.drained = self.hub.stop(drain_s)
        return self.drained

    def __enter__(self) -> Self:
        self.hub.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class Engine:
    """An engine of a `MemoryHub`, or one pipeline stage of it. It numbers its frames and counts its requests' rows."""

    def __init__(
        self,
        hub: MemoryHub,
        hello: Hello,
        sites: Iterable[Site | tuple[int, str]] | None,
        capture: Capture | None,
        seq: int,
    ) -> None:
        assert hello.model is not None
        self.name = hello.engine
        self.model = hello.model
        self.sites = tuple(Site(*site) for site in (self.model.sites if sites is None else sites))
        self.capture = capture
        self._acts: list[Action] = []
        self._scheduler: LocalPeer | None = None
        if hello.rank == FIRST:
            scheduler = make_hello(self.name, f"{hello.boot}-scheduler", role="scheduler", model=self.model)
            self._scheduler = LocalPeer(hub.hub, scheduler, on_act=self._act)
        self.worker = LocalPeer(hub.hub, hello, seq=seq)
        # The rows of each open request.
        self._rows: Counter[str] = Counter()
        # The prompt length and the computed length of each open request.
        self._lengths: dict[str, tuple[int, int]] = {}

    def step(self, requests: Sequence[tuple[str, int, int, int]], **frame: Any) -> Frame:
        """Send the rows of a step and return the frame.

        requests: `(id, prompt_length, start, length)` of each.
        frame: further arguments of `make_frame`.
        """
        made = self.made(requests, **frame)
        self.send(made)
        return made

    def made(self, requests: Sequence[tuple[str, int, int, int]], **frame: Any) -> Frame:
        """Return the frame that `step` sends, and count its rows as sent."""
        options: dict[str, Any] = {
            "sites": self.sites,
            "hidden": self.model.hidden_size,
            "dtype": self.model.dtype,
            "shapes": self.model.own_shapes,
        } | frame
        if self.capture is not None:
            options["captures"] = {request: self.capture for request, *_ in requests} | options.get("captures", {})
        made = make_frame(requests, **options, **self._of())
        self._rows.update(rows_of(made.header))
        for request, prompt_length, start, length in requests:
            self._lengths[request] = (prompt_length, start + length)
        return made

    def promise(self, request: str, prompt_length: int, start: int, length: int) -> None:
        """Count rows of a request that an earlier hub received."""
        self._rows[request] += length * len(self.sites)
        self._lengths[request] = (prompt_length, start + length)

    def finish(
        self,
        request: str,
        *,
        prompt_length: int = 4,
        status: str = "stop",
        lost: Sequence[tuple[int, str]] = (),
        incarnation: str = "",
    ) -> Frame:
        """Send the end of a request.

        prompt_length: of a request that had no step.
        lost: further rows that were promised and lost, each number with its reason.
        incarnation: as in the request's steps.
        """
        prompt_length, computed = self._lengths.pop(request, (prompt_length, 0))
        dropped = tuple(Dropped(rows, reason) for rows, reason in lost)
        rows = self._rows.pop(request, 0)
        over = make_finished(
            request,
            prompt_length,
            computed,
            rows=rows,
            status=status,
            dropped=dropped,
            capture=self.capture,
            incarnation=incarnation,
        )
        model = self.model
        made = make_frame([], finished=[over], hidden=model.hidden_size, dtype=model.dtype, **self._of())
        self.send(made)
        return made

    def send(self, frame: Frame) -> None:
        """Send a frame as it is; wait for the hub's credit."""
        self.worker.give(frame)

    def settle(self) -> None:
        """Wait until consumers with policies `block` and `spill` have the frames.

        Raises CapflowError after `WAIT_S`.
        """
        if not self.worker.settle(WAIT_S):
            raise CapflowError(explain(f"engine {self.name}", got="frames not handled", expected=f"in {WAIT_S:g} s"))

    def actions(self) -> list[Action]:
        """Return the actions that consumers sent this engine so far; the answer to each is `ActionApplied`."""
        if self._scheduler is not None:
            self._scheduler.hear()
        return list(self._acts)

    def lose(self) -> None:
        """Disconnect for ever: open requests end with status `error`."""
        self.worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _act(self, act: Act) -> Outcome:
        self._acts.append(act.action)
        return ActionApplied(act.id, self.worker.seq)

    def _of(self) -> dict[str, Any]:
        hello = self.worker.hello
        return {"engine": hello.engine, "boot": hello.boot, "rank": hello.rank, "seq": self.worker.seq + 1}
