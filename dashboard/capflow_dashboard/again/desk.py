"""The runs of pages: who may run a request again, how many at once, and what ends them.

A run is a pair of completions of one prompt, plain and steered. It goes through the bounds of steering, and belongs to
the connection of its page: it ends with it, with the page's `stop`, with the kill switch, and after a while.

Invariant: a page has at most one run, and all pages have at most `limits.AGAIN_RUNS_MAX`. None begins while steering is
frozen, and none goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from capflow.errors import explain
from capflow.limits import Name
from capflow_dashboard import limits
from capflow_dashboard.again.address import CompletionServer
from capflow_dashboard.again.stream import CompletionStream
from capflow_dashboard.board.board import Board
from capflow_dashboard.steering import PageAction, PageRights, SteeringDesk, label_of


class RunAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page asks for a run, or for its end.

    id: the page's number of it.
    stop: whether the page's run is to end; the other fields do not matter then.
    request: the key of the request whose prompt is run.
    kind, name, mode, ratio: what steers, as in `PageAction`.
    everywhere: whether the prompt is steered too, and not the answer alone. A module says itself what it steers.
    tokens: how many tokens each answer has at most.
    temperature: 0 for the most likely tokens. Both answers have the seed 0.
    """

    id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    stop: bool = False
    request: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    kind: Literal["steer", "gain"] = "steer"
    name: Name = ""
    mode: Literal["add", "remove"] = "add"
    ratio: float = 0.0
    everywhere: bool = False
    tokens: Annotated[int, msgspec.Meta(ge=1, le=limits.AGAIN_TOKENS_MAX)] = 64
    temperature: Annotated[float, msgspec.Meta(ge=0, le=limits.AGAIN_TEMPERATURE_MAX)] = 0.0

    @property
    def action(self) -> PageAction:
        """What steers."""
        return PageAction(self.id, self.kind, 0, self.name, self.mode, self.ratio)


class _Run:
    """A pair of completions.

    sides: `plain` and `steered`.
    """

    def __init__(self, id: int, label: str, sides: dict[str, CompletionStream]) -> None:
        self.id = id
        self.label = label
        self.sides = sides

    @property
    def over(self) -> bool:
        return all(side.over for side in self.sides.values())

    @property
    def running(self) -> bool:
        return any(side.running for side in self.sides.values())

    def start(self) -> None:
        for side in self.sides.values():
            side.start()

    def stop(self, reason: str) -> None:
        for side in self.sides.values():
            side.stop(reason)


class AgainDesk:
    """Runs requests of a board again, for pages that may steer.

    server: where; None if pages may not.
    on_run: called with the text and the fields of each run, to log it.
    """

    def __init__(
        self,
        board: Board,
        steering: SteeringDesk,
        server: CompletionServer | None,
        on_run: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.server = server
        self._board = board
        self._steering = steering
        self._on_run = on_run
        # Guards the field below: the kill switch comes on any thread.
        self._lock = threading.Lock()
        self._runs: list[_Run] = []
        steering.on_freeze = lambda: self.stop_all("stopped: the kill switch is pressed")

    def describe(self) -> dict[str, Any] | None:
        """Return what pages may do, for their first message; None if they may not run requests."""
        if self.server is None or not self._steering.allowed:
            return None
        return {
            "server": self.server.url,
            "tokens_max": limits.AGAIN_TOKENS_MAX,
            "temperature_max": limits.AGAIN_TEMPERATURE_MAX,
        }

    def stop_all(self, reason: str) -> None:
        """End all runs."""
        with self._lock:
            runs = list(self._runs)
        for run in runs:
            run.stop(reason)

    def begin(self, page: PageRights, ask: RunAsk, on_change: Callable[[], None]) -> _Run | str:
        """Begin a run; return it, or why it is refused."""
        if self.server is None:
            return explain("server", got="none", do="start the dashboard with --server")
        with self._lock:
            self._runs = [run for run in self._runs if run.running]
            if len(self._runs) >= limits.AGAIN_RUNS_MAX:
                expected = f"at most {limits.AGAIN_RUNS_MAX} of all pages"
                return explain("runs", got=f"{len(self._runs)}, which go on", expected=expected)
        prompt = self._board.prompt_of(ask.request)
        if isinstance(prompt, str):
            return prompt
        label, name = label_of(page, ask.action), uuid.uuid4().hex[:8]
        body = {"prompt": prompt.ids, "max_tokens": ask.tokens, "temperature": ask.temperature, "seed": 0}
        run = _Run(ask.id, label, {})

        def start() -> None:
            assert self.server is not None
            fields = self._steering.fields(ask.action, everywhere=ask.everywhere)
            for side, more in (("plain", {}), ("steered", fields)):
                run.sides[side] = CompletionStream(
                    self.server,
                    f"again-{name}-{side}",
                    prompt.model,
                    body | more,
                    steered=side == "steered",
                    on_change=on_change,
                )
            with self._lock:
                self._runs.append(run)
            run.start()

        refusal = self._steering.admit(page, ask.action, start)
        if refusal is not None:
            return refusal
        plain, steered = (side.request for side in run.sides.values())
        event = {"event": "run_again", "engine": prompt.engine, "request": prompt.request, "label": label}
        text = f"request {prompt.request} runs again as {plain} and {steered}: {label}"
        self._on_run(text, event | {"plain": plain, "steered": steered})
        return run


class PageRuns:
    """The runs of one page, one after another. All of it runs on the server's thread."""

    def __init__(self, desk: AgainDesk) -> None:
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        # Set when there is news.
        self._changed = asyncio.Event()
        # The last run.
        self._run: _Run | None = None
        # The answer to an ask that was refused, until it is sent; a newer one replaces it.
        self._refused: dict[str, Any] | None = None
        # Ends the run after `limits.AGAIN_S_MAX`.
        self._limit: asyncio.TimerHandle | None = None

    def take(self, page: PageRights, ask: RunAsk) -> None:
        """Do what the page asks for, or refuse it."""
        if ask.stop:
            if self._run is not None:
                self._run.stop("stopped")
            return
        if self._run is not None and not self._run.over:
            begun: _Run | str = explain("run", got="a second one", expected="one of each page", do="stop the first")
        else:
            begun = self._desk.begin(page, ask, self._tell)
        if isinstance(begun, str):
            self._refused = {"id": ask.id, "error": begun}
            self._changed.set()
            return
        self.leave()
        self._run = begun
        longest = f"stopped: it took {limits.AGAIN_S_MAX:g} s"
        self._limit = self._loop.call_later(limits.AGAIN_S_MAX, begun.stop, longest)

    async def news(self) -> dict[str, Any]:
        """Wait for news of the run and return it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._refused is not None:
                refused, self._refused = self._refused, None
                self._changed.set()
                return refused
            if self._run is None:
                continue
            sides = {name: news for name, side in self._run.sides.items() if (news := side.news()) is not None}
            if sides:
                return {"id": self._run.id, "label": self._run.label, **sides}

    def leave(self) -> None:
        """End the run: the page is gone, or begins another one."""
        if self._limit is not None:
            self._limit.cancel()
        if self._run is not None:
            self._run.stop("stopped: the page is gone")

    def _tell(self) -> None:
        """Note that there is news. Called on any thread."""
        # The loop is closed when the server has stopped.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)
