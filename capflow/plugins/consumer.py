"""The plugin contract: the classes `Consumer` and `Controller`, and the hook by which a package brings them.

A package names a module in its entry points, in the group `capflow`:

    [project.entry-points.capflow]
    my_plugin = "my_package.my_module"

The module implements `capflow_consumers` with `capflow.hookimpl`. capflow's own consumers are registered the same way.

A consumer runs in the hub and receives rows. It has a thread of its own: its methods never run at the same time, and it
may block without slowing other consumers. A controller runs in a worker, between two steps. It receives rows and
returns actions, which hold from the next position on.

A frozen msgspec struct, `Config`, has the options of both: each field is an option of `--consumer NAME:field=value`.
Fields without a default are required; unknown options are errors. Lists are written `a+b+c`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pluggy

from capflow import limits
from capflow.buffers.policy import POLICY_DEFAULT
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.limits import Name
from capflow.steering.action import Action, Answered
from capflow.steering.request import Steering
from capflow.text.brief import brief


class NoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin without options."""


class Context(Protocol):
    """What the hub offers to a consumer. Valid from `open` to the end of `close`."""

    def act(self, action: Action) -> None:
        """Send an action to the engine that runs its request. The outcome is counted and logged."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this consumer, which is shown with the hub's own."""

    def hub_status(self) -> dict[str, Any]:
        """Return what `capflow status --json` prints of this hub."""

    def left_s(self) -> float | None:
        """Return how many seconds the hub that stops still waits for `close`; None while it does not stop."""

    def working(self) -> None:
        """Note that a long call makes progress: it does not hang, however long it takes."""


class Backlog(NamedTuple):
    """What a consumer has taken and stored, and not delivered yet.

    items, nbytes: how many things wait, such as files, and their size.
    trouble: why they cannot be delivered now, for anyone to read: it names nothing that is captured; empty if they can.
    """

    items: int = 0
    nbytes: int = 0
    trouble: str = ""


class Named:
    """The names of a plugin and of its instance.

    name: the plugin's, as in `--consumer NAME`.
    extra: the extra of capflow whose packages the plugin needs, such as `files`; none by default. The plugin's module
        imports these packages in its methods: if one is missing, the plugin is refused in one line before it is made.
    """

    name: ClassVar[str]
    extra: ClassVar[str] = ""
    _instance: str = ""

    @property
    def instance(self) -> str:
        """Its name in results, metrics and logs: `name`, or `name@…` if it was configured so."""
        return self._instance or self.name

    @instance.setter
    def instance(self, instance: str) -> None:
        self._instance = instance


class Consumer(Named, ABC):
    """Receives rows in the hub. Subclasses set the class variables and implement the methods.

    An exception of a method has one of three effects, by `capflow.errors.kind_of`: the call is repeated later (retry),
    the consumer is closed and opened again (fatal), or the frame is set aside (poison).

    name: the plugin's, as in `--consumer NAME`. `instance` is this consumer's: `NAME` or `NAME@…`.
    policy: what its queue does if it is full. The option `policy`, which every consumer has, overrides it.
    queue_bytes_max: how many bytes may wait in its queue. The option `queue_bytes_max` overrides it.
    reads_requests: whether it receives the rows of requests' own specs, beside those of its own `spec`.
    """

    Config: ClassVar[type[msgspec.Struct]] = NoConfig
    policy: ClassVar[str] = POLICY_DEFAULT
    queue_bytes_max: ClassVar[int] = limits.QUEUE_BYTES_DEFAULT
    reads_requests: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def spec(self) -> CaptureSpec | None:
        """Return what to capture of every request for this consumer, or None.

        It is called once, in the hub's process, after `check`. Raises UsageError if the options name no spec.
        """
        return None

    def check(self) -> None:
        """Raise UsageError if the configuration cannot work. Nothing is open or started yet."""

    def claim(self) -> tuple[str, str] | None:
        """Return what only this consumer may write, as an option and its value; None if several may share it.

        A hub refuses two instances of one consumer with the same claim.
        """
        return None

    def open(self, context: Context) -> None:
        """Open what the consumer needs. An exception stops the hub's start.

        It may be called again after `close`, and then starts from an empty state.
        """

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """An engine connected or came back. Called before any frame of it.

        Two events that occur before the call may be one call.
        """

    def on_engine_gone(self, engine: str) -> None:
        """An engine is gone and all its requests ended: forget it. Its frames come only after another `on_session`."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Take a frame; `frame.chunks()` holds this consumer's rows. Views of it may be kept.

        Frames of one worker come in order. Raises RetryError if the frame may be taken later; nothing of it was taken,
        and it is given again. Raises FatalError if the consumer must be closed and opened again. Any other exception
        sets the frame aside, except those that `capflow.errors.kind_of` maps to one of these: the results of its
        requests have status `error` or `partial_error`, and the next frame comes.
        """

    def on_request_done(self, done: RequestDone) -> CaptureResult | Future[CaptureResult] | None:
        """A request ended, and all its rows were given to `on_frame`. None means `ok` without a payload.

        Called for every request of which this consumer was to get rows, except those that end while 32 MiB of ends wait
        for it (`limits.NOTES_BYTES_MAX`). With a Future, slow work goes on beside the next calls: the hub keeps the
        frames of the request until the Future has a result. An exception in it counts as one of this method. `close`
        must leave no Future without a result.

        The result names what is stored. Raises as `on_frame` does: after RetryError the call is repeated.
        """
        return None

    def on_action(self, answered: Answered) -> None:
        """An event of a request's steering: an action was applied or rejected, a gate opened, a lease ended.

        Called for all requests, also for those of which no rows are captured. An action that came through this hub is
        reported when it is answered. An event of a worker (the steering that a request brings, the actions of
        controllers, gates) follows the rows of its step, and comes before `on_request_done`. After a kill, a consumer
        with policy `spill` may get an event again, with the same id.
        """

    def look(self) -> tuple[str, str] | None:
        """Return the place of the data and a command that shows it, for the table at the end of a run."""
        return None

    def backlog(self) -> Backlog | None:
        """Return what waits to be delivered elsewhere; None for a consumer that delivers nothing. On any thread."""
        return None

    def on_idle(self) -> None:
        """Called about four times a second, between frames and while there are none."""

    def close(self) -> None:
        """Close what `open` opened. All frames were handled before."""


class StepProbe(NamedTuple):
    """A probe whose scores a controller reads; the engine computes them where the rows are.

    site: where it reads the stream, before anything steers it there.
    weight: `[hidden_size]` numbers.
    bias: is added to the score.
    score: `dot` (`x · weight`), `cosine` (`x · weight / (‖x‖ ‖weight‖)`) or `cast` (the cosine of `x` and
        `tanh(proj x)`, where `proj x` is the projection of `x` on the weight).
    positions: the positions that it scores, in a form of `CaptureSpec.positions`.
    """

    site: Site
    weight: npt.ArrayLike
    bias: float = 0.0
    score: str = "dot"
    positions: Any = "all"

    def spec(self) -> CaptureSpec:
        """Return the site and the positions as a spec."""
        return CaptureSpec({self.site.hook: [self.site.layer]}, self.positions)

    def __repr__(self) -> str:
        return brief(self)


SCORES = ("dot", "cosine", "cast")
"""The kinds of scores."""


class StepRows(NamedTuple):
    """Rows of one request at one site in the step just computed.

    rows: `[count, hidden_size]` float32.
    """

    request: str
    site: Site
    start: int
    prompt_length: int
    rows: npt.NDArray[np.float32]

    def __repr__(self) -> str:
        return brief(self)


class StepScores(NamedTuple):
    """Scores of one request by one probe in the step just computed.

    probe: the index of the probe in `Controller.probes`.
    start: the position of the first score.
    scores: `[count]` float32, one for each position from `start` on.
    """

    request: str
    site: Site
    probe: int
    start: int
    prompt_length: int
    scores: npt.NDArray[np.float32]

    def __repr__(self) -> str:
        return brief(self)


class ScoreBatch(NamedTuple):
    """Scores of many requests by one probe: the content of several `StepScores` in one array, request after request.

    requests: for each part, the request's id.
    starts, prompt_lengths: for each part, as in `StepScores`.
    offsets: `[parts + 1]`: part `n` has `scores[offsets[n] : offsets[n + 1]]`.
    """

    probe: int
    site: Site
    requests: Sequence[str]
    starts: Sequence[int]
    prompt_lengths: Sequence[int]
    offsets: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]

    def __repr__(self) -> str:
        return brief(self)


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """An action of a controller with its cause, which the action's event then has.

    action: None for an event of kind `gate` alone: nothing changes.
    position: the position whose score decided.
    score: the score.
    threshold: what it was compared with.
    label: the event's label; by default the action's.
    """

    request: Name
    action: Action | None = None
    position: int | None = None
    score: float | None = None
    threshold: float | None = None
    label: Name = ""

    __repr__ = brief


class StepView(Protocol):
    """A step as a controller sees it: the rows that its `spec` names, and the scores of its `probes`."""

    step: int

    def rows(self) -> Iterator[StepRows]:
        """Yield the rows, request by request."""

    def scores(self) -> Iterator[StepScores]:
        """Yield the scores, request by request, for each probe."""

    def score_batches(self) -> Iterator[ScoreBatch]:
        """Yield the same scores in larger arrays."""

    def steered(self) -> Collection[str]:
        """Return the ids of the requests that this controller changes now, by a `Steer`, a `Gain` or a `SetGate`."""


class Controller(Named, ABC):
    """Runs between two steps, in a worker.

    `State` travels from the hub to the workers. In the hub, `load` makes it from the `Config`, and reads the files that
    this names. In a worker, the class is made from it.

    mode: when its actions apply; one of `MODES`.

        * `replicated`: from the next position on. It runs before the next step, in the first rank of the pipeline stage
          that has its sites; one stage must have all of them. The other ranks of the stage apply its decisions.
        * `ordered`: from the next position on, or one later with async scheduling. It runs when the output of the step
          is taken, in the rank that returns the output, so the step never waits for it. It reads at the last pipeline
          stage and steers at any. Its decisions go to the scheduler, which orders every rank to apply them.
    requests: the requests that it sees: those whose id matches this pattern, as in `fnmatch`.
    """

    Config: ClassVar[type[msgspec.Struct]]
    State: ClassVar[type[msgspec.Struct]]
    mode: str = "replicated"
    requests: str = "*"

    @classmethod
    @abstractmethod
    def load(cls, config: Any) -> msgspec.Struct:
        """Return the state. Raises UsageError if the configuration cannot work."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def spec(self) -> CaptureSpec | None:
        """Return the sites and positions whose rows `on_step` sees, of every request; None if it reads no rows.

        Each such position is seen once: cached positions of prompts are computed again.
        """
        return None

    def probes(self) -> Sequence[StepProbe]:
        """Return the probes whose scores `on_step` sees. A score takes 4 bytes, where a row takes thousands.

        A score depends on its row alone: not on the batch, nor on how a prompt is cut into chunks.
        """
        return ()

    def steering(self) -> Steering | None:
        """Return what steers every request that it sees, from the admission on; None if it brings nothing.

        Called once, in the hub. It may have vectors, clamps and gates, which decide in the forward pass itself; it has
        no patches and names no modules. It adds to what the request brings. Steering that does not fit the model or
        the engine does nothing, and the hub's problems say so.
        """
        return None

    def steers(self) -> Sequence[Site]:
        """Return the sites at which it steers, as far as it knows them. Impossible ones are refused at the start."""
        return ()

    def open(self, model: ModelInfo) -> None:
        """Raise UsageError if the state does not fit the model."""

    @abstractmethod
    def on_step(self, view: StepView) -> Sequence[Action | Decision]:
        """Return the actions that hold from each request's next position on.

        These are `Steer`, `Unsteer`, `Gain`, `SetGate` and `Abort`, with leases in positions. They change no position
        of the prompt. Gains of several senders multiply; of several `SetGate`, the hub's comes last. An action that
        holds already changes nothing. While the engine is frozen, all but `Abort` are refused. The batch,
        `--max-num-batched-tokens` and drafts decide which positions a step has. So that a request's actions do not
        depend on them, a controller must use every row, in the order of positions. A position that is seen again,
        after a draft was rejected, takes the place of the first and of all later ones. After an exception the step's
        actions are not done. `Abort` needs the mode `ordered`.
        """

    def on_request_done(self, request: str) -> None:
        """A request ended; forget it."""


MODES = ("replicated", "ordered")


ENTRY_POINT_GROUP = "capflow"

hookspec = pluggy.HookspecMarker("capflow")
hookimpl = pluggy.HookimplMarker("capflow")


@hookspec
def capflow_consumers() -> Sequence[type[Consumer | Controller]]:  # type: ignore[empty-body]
    """Return the consumer and controller classes that the plugin brings.

    Each has a unique `name` of letters, digits, `-` and `_`. Two plugins of one name stop the start; so does a class
    that is neither a `Consumer` nor a `Controller`.
    """
