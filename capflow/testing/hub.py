"""A hub for tests: the real one with its lanes, ledger and sessions; only the workers' sockets are missing.

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
"""How long anything is waited for; then it is taken not to come."""

_POLL_S = 0.002


class MemoryHub:
    """A hub with these consumers, from `with` to its end. Each is given as it is, or with a queue: `ConfiguredConsumer.of(…)`."""

    def __init__(self, *consumers: Consumer | ConfiguredConsumer) -> None:
        made = [c if isinstance(c, ConfiguredConsumer) else ConfiguredConsumer.of(c) for c in consumers]
        self.hub = Hub(private_address("testing"), made)
        # Whether everything was handled and closed in time; once it is over.
        self.drained: bool | None = None

    @property
    def lanes(self) -> Sequence[Lane]:
        """What the hub counts of each consumer: `errors`, `rows`, `dropped`, `counts` and more."""
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
        """Return an engine that has connected, or one pipeline stage or replica of it.

        sites: those of its frames; by default all of the model.
        capture: what each of its requests brings.
        seq: the last frame that an earlier hub had of this boot. Raises CapflowError when the hub refuses it: a
            consumer wants what the model lacks.
        """
        hello = make_hello(name, boot, rank=Rank(stage, replica, 0), model=model)
        return Engine(self, hello, sites, capture, seq)

    def results(self, request: str, engine: str = "") -> dict[str, CaptureResult]:
        """Return what became of a request, by consumer, when all are done with it. Raises CapflowError when that does not come.

        engine: whose request it is, by name; the newest of the id without.
        """

        def ask() -> tuple[dict[str, CaptureResult], bool] | None:
            ledger = self.hub.ledger
            named = ledger.named(request, engine)
            return ledger.results_of(named[-1]) if named else None

        deadline = time.monotonic() + WAIT_S
        while True:
            found = self.asked(ask)
            if found is not None and found[1]:
                return found[0]
            if time.monotonic() >= deadline:
                raise CapflowError(explain(f"request {request}", got=found, expected=f"results in {WAIT_S:g} s"))
            time.sleep(_POLL_S)

    def result(self, request: str, engine: str = "") -> CaptureResult:
        """Return what became of a request with the first consumer.

        engine: as of `results`.
        """
        return self.results(request, engine)[self.hub.consumers[0].name]

    def asked(self, question: Callable[[], T]) -> T:
        """Return what a question answers on the hub's thread, which everything sent before has reached."""
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
        """End the hub; return whether the consumers handled everything and closed in time."""
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
    """An engine of a `MemoryHub`, or one pipeline stage of it. It numbers its frames, and counts the rows of its requests."""

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
        # By request, until it is finished.
        self._rows: Counter[str] = Counter()
        # Prompt, and computed so far; likewise.
        self._lengths: dict[str, tuple[int, int]] = {}

    def step(self, requests: Sequence[tuple[str, int, int, int]], **frame: Any) -> Frame:
        """Send the rows of a step: requests are `(id, prompt_length, start, length)`, the rest is `make_frame`'s. Return the frame."""
        made = self.made(requests, **frame)
        self.send(made)
        return made

    def made(self, requests: Sequence[tuple[str, int, int, int]], **frame: Any) -> Frame:
        """Return the frame that `step` sends; it counts as sent."""
        options: dict[str, Any] = {
            "sites": self.sites,
            "hidden": self.model.hidden_size,
            "dtype": self.model.dtype,
        } | frame
        if self.capture is not None:
            options["captures"] = {request: self.capture for request, *_ in requests} | options.get("captures", {})
        made = make_frame(requests, **options, **self._of())
        self._rows.update(rows_of(made.header))
        for request, prompt_length, start, length in requests:
            self._lengths[request] = (prompt_length, start + length)
        return made

    def promise(self, request: str, prompt_length: int, start: int, length: int) -> None:
        """Count rows of a request that an earlier hub was sent."""
        self._rows[request] += length * len(self.sites)
        self._lengths[request] = (prompt_length, start + length)

    def finish(
        self,
        request: str,
        *,
        prompt_length: int = 4,
        status: str = "stop",
        lost: Sequence[tuple[int, str]] = (),
    ) -> Frame:
        """Send the end of a request.

        prompt_length: of one that had no step.
        lost: rows that were promised besides, and why they did not come.
        """
        prompt_length, computed = self._lengths.pop(request, (prompt_length, 0))
        dropped = tuple(Dropped(rows, reason) for rows, reason in lost)
        rows = self._rows.pop(request, 0)
        over = make_finished(
            request, prompt_length, computed, rows=rows, status=status, dropped=dropped, capture=self.capture
        )
        model = self.model
        made = make_frame([], finished=[over], hidden=model.hidden_size, dtype=model.dtype, **self._of())
        self.send(made)
        return made

    def send(self, frame: Frame) -> None:
        """Send a frame as it is, waiting until the hub has credit for it."""
        self.worker.give(frame)

    def settle(self) -> None:
        """Wait until consumers with policies `block` and `spill` have what was sent. Raises CapflowError when they do not come to it."""
        if not self.worker.settle(WAIT_S):
            raise CapflowError(explain(f"engine {self.name}", got="frames not handled", expected=f"in {WAIT_S:g} s"))

    def actions(self) -> list[Action]:
        """Return the actions that consumers sent to this engine so far; each was answered as applied."""
        if self._scheduler is not None:
            self._scheduler.hear()
        return list(self._acts)

    def lose(self) -> None:
        """Go away for good: what was not finished is over, with status `error`."""
        self.worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _act(self, act: Act) -> Outcome:
        self._acts.append(act.action)
        return ActionApplied(act.id, self.worker.seq)

    def _of(self) -> dict[str, Any]:
        hello = self.worker.hello
        return {"engine": hello.engine, "boot": hello.boot, "rank": hello.rank, "seq": self.worker.seq + 1}
