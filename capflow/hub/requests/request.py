"""A request, and the engine that runs it, as a hub knows them."""

from __future__ import annotations

from typing import Any, NamedTuple

from capflow.capture.frame import Finished
from capflow.capture.losses import Losses
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site, mask_of
from capflow.hub.counts import age_s
from capflow.hub.requests.share import Share
from capflow.protocol.row_format import RowFormat
from capflow.steering.action import Answered
from capflow.steering.events import answered_by
from capflow.text.engine_name import name_of

REQUEST_BYTES = 1024
"""About how many bytes of memory a request takes, besides what each consumer wants of it."""

Before = tuple[int, list[tuple[tuple[Site, ...], int]]]
"""The first step of which rows came, and its sites, with the first position that came at each."""

_ENGINE_BYTES, _SITE_BYTES = 2048, 144  # of memory
# Of a request that is over and done with; never written to.
_NOTHING: dict[int, Any] = {}
# The losses of such a request; never written to.
_NO_LOSSES = Losses()


class RequestName(NamedTuple):
    """A request as the lane of a consumer names it whose requests outlive hubs: the id of its engine, and its own."""

    engine: str
    id: str

    @property
    def key(self) -> tuple[str, str]:
        """The name of its engine, and its id."""
        return name_of(self.engine), self.id


class KnownEngine:
    """An engine: its model, its open requests by id, and its workers' public key ("" without keys)."""

    def __init__(self, name: str, model: ModelInfo, user: str = "") -> None:
        self.name = name
        self.model = model
        self.user = user
        # Pipeline stages that said Bye and did not come back.
        self.stages_left: set[int] = set()
        # The time since which nobody of it was connected or expected.
        self.missed_since: float | None = None
        # By data-parallel replica, since when no worker of it is connected; None while one is.
        self.replicas: dict[int, float | None] = {}
        # Its open requests, by id.
        self.open: dict[str, Request] = {}
        self.format = RowFormat(model)
        self.tapped = mask_of(model.sites)
        # The last step counted, by data-parallel replica.
        self.step_last: dict[int, int] = {}
        # Whether requests of it had no room here, and were not opened.
        self.full = False

    @property
    def owner(self) -> str:
        """The owner of the memory that the engine takes, as in `capflow.buffers.shares`."""
        return self.user or f"engine {self.name}"

    @property
    def nbytes(self) -> int:
        """About how many bytes of memory it takes, besides its requests."""
        return _ENGINE_BYTES + _SITE_BYTES * (len(self.model.sites) + len(self.model.fixed)) + 4 * len(self.model.name)


class Request:
    """A request and, per consumer: its share (None where it wants nothing of it) and its result.

    When it is over and has every result, all else of it is let go of: thousands are kept so.
    """

    __slots__ = (
        "before",
        "engine",
        "finished",
        "first_stage",
        "id",
        "lost",
        "nbytes",
        "opened_at",
        "prompt_length",
        "received",
        "replica",
        "results",
        "shares",
        "status",
        "strangers",
        "tags",
        "tokens",
    )

    def __init__(
        self,
        engine: str,
        request: str,
        replica: int,
        shares: tuple[Share | None, ...],
        tags: tuple[str, ...],
        strangers: tuple[str, ...] = (),
        first_stage: int = 0,
    ) -> None:
        self.engine = engine
        self.id = request
        self.replica = replica
        # The pipeline stage that named it first.
        self.first_stage = first_stage
        self.shares = shares
        self.results: list[CaptureResult | None] = [
            CaptureResult("not_requested") if share is None else None for share in shares
        ]
        # The tag of its spec, for each consumer.
        self.tags = tags
        # Names in its capture that no consumer here has.
        self.strangers = strangers
        self.prompt_length = 0
        # When it was opened, on the monotonic clock.
        self.opened_at = 0.0
        # The position after the last one of which rows came: how many tokens are computed, at least.
        self.tokens = 0
        # Received rows, by pipeline stage.
        self.received: dict[int, int] = {}
        # What came first, by pipeline stage.
        self.before: dict[int, Before] = {}
        # Its ends, by pipeline stage.
        self.finished: dict[int, Finished] = {}
        # Rows that did not reach this hub.
        self.lost = Losses()
        # The status of its end; None while it runs.
        self.status: str | None = None
        # The memory that it takes while it is open.
        self.nbytes = 0

    @property
    def key(self) -> tuple[str, str]:
        """The name of its engine, and its id."""
        return name_of(self.engine), self.id

    def as_running(self, now: float) -> dict[str, Any]:
        """Return how far it is, as plain JSON values.

        now: the time on the monotonic clock, seconds.
        """
        return {
            "id": self.id,
            "engine": self.engine,
            "age_s": age_s(self.opened_at, now),
            "prompt_length": self.prompt_length,
            "tokens": self.tokens,
            "rows": sum(self.received.values()),
        }

    def settle(self, consumer: int, result: CaptureResult) -> None:
        """Note what a consumer made of it."""
        self.results[consumer] = result
        self.let_go()

    def let_go(self) -> None:
        """Keep only the results, if all are there. Call it when every lane has the end of the request."""
        if self.status is not None and None not in self.results:
            self.received, self.before, self.finished, self.lost = _NOTHING, _NOTHING, _NOTHING, _NO_LOSSES

    def acted(self) -> list[Answered]:
        """Return the changes of its steering that its workers made, oldest first. Each always has the same id."""
        answered_all = [
            answered
            for stage, finished in self.finished.items()
            for answered in answered_by(self.engine, self.id, finished.incarnation, stage, finished.acted)
        ]
        return sorted(answered_all, key=lambda answered: answered.time_ns)

    def ends_with(self, stage: int, *, restarted: bool) -> bool:
        """Return whether the request cannot end any more, because a pipeline stage is gone or restarted."""
        if restarted:
            return stage == self.first_stage or (stage in self.received and stage not in self.finished)
        return stage not in self.finished

    @property
    def computed_length(self) -> int:
        """How many tokens were computed, as far as the stages that ended it have said."""
        return max((finished.computed_length for finished in self.finished.values()), default=0)
