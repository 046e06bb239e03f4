"""The plugin contract: the classes `Consumer` and `Controller`, and the hook by which a package brings them.

A package names a module in its entry points, group `capflow`:

    [project.entry-points.capflow]
    my_plugin = "my_package.my_module"

and the module implements `capflow_consumers` with `capflow.hookimpl`. capflow's own consumers are registered the same way.

A consumer lives in the hub and is given rows. It has one thread of its own: none of its methods is called
while another runs, and it may block without slowing any other consumer. A controller lives in a worker,
between two steps, and answers rows with actions that hold from the next position on.

Both are configured by a frozen msgspec struct, `Config`: each field is an option of `--consumer NAME:field=value`;
fields without a default are required and unknown options are errors. Lists are written `a+b+c`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pluggy

from capflow.buffers.policy import POLICY_DEFAULT
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.steering.action import Action, Answered
from capflow.text.brief import brief


class NoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin without options."""


class Context(Protocol):
    """What the hub offers a consumer; valid from `open` to the end of `close`."""

    def act(self, action: Action) -> None:
        """Send an action to the engine that runs its request; what comes of it is counted and logged."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this consumer, shown with the hub's own."""


class Named:
    """What has a plugin's name, and a name of its own where one hub has several of the plugin.

    name: the plugin's, which `--consumer NAME` gives.
    """

    name: ClassVar[str]
    _instance: str = ""

    @property
    def instance(self) -> str:
        """What it is called in results, metrics and logs: `name`, or `name@…` where it was configured as such."""
        return self._instance or self.name

    @instance.setter
    def instance(self, instance: str) -> None:
        self._instance = instance


class Consumer(Named, ABC):
    """Given rows in the hub. Subclasses set the class variables and fill in the methods.

    An exception of a method is of one of three kinds, see `capflow.errors.kind_of`: the call is made again later (retry), the consumer is
    closed and opened again (fatal), or what it was given is set aside (poison).

    name: what `--consumer NAME` says; `instance` is what this one is called, `NAME` or `NAME@…`.

    policy: what its queue does when full, unless configured otherwise (the option `policy` is every consumer's, as is
        `queue_bytes_max`).
    reads_requests: whether it is given the rows that requests ask for themselves, beside those of its own `spec`.
    """

    Config: ClassVar[type[msgspec.Struct]] = NoConfig
    policy: ClassVar[str] = POLICY_DEFAULT
    reads_requests: ClassVar[bool] = True

    def __init__(self, config: Any) -> None:
        self.config = config

    def spec(self) -> CaptureSpec | None:
        """Return what to capture of every request for this consumer, or None.

        It is called once, in the hub's process, after `check`. Raises UsageError when the options name no spec.
        """
        return None

    def check(self) -> None:
        """Raise UsageError when the configuration cannot work, before anything is opened or started."""

    def claim(self) -> tuple[str, str] | None:
        """Return what this consumer alone may write, as an option and its value; None when several may share it.

        A hub refuses two instances of one consumer with the same claim.
        """
        return None

    def open(self, context: Context) -> None:
        """Take what the consumer needs. An exception stops the hub's start.

        It may be called again after `close`, and begins anew then: nothing of the opening before is left.
        """

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """An engine connected (or came back); called before any frame of it. What happens twice before it is told may be told once."""

    def on_engine_gone(self, engine: str) -> None:
        """An engine is gone and all its requests are over: forget it. No frame of it comes before the next `on_session` that names it."""

    @abstractmethod
    def on_frame(self, frame: Frame) -> None:
        """Take a frame; `frame.chunks()` holds this consumer's rows. Views of it may be kept.

        Frames of one worker come in order. Raises RetryError, having taken nothing of the frame, when it may be taken later: it is given
        again. Raises FatalError when the consumer must be closed and opened again. Any other exception, but those that
        `capflow.errors.kind_of` takes for one of these, sets the frame aside: its requests are answered with status `error` or `partial_error`,
        and the next frame comes all the same.
        """

    def on_request_done(self, done: RequestDone) -> CaptureResult | Future[CaptureResult] | None:
        """A request is over, and every row of it was given to `on_frame`. None means `ok` with no payload.

        Called for every request of which this consumer was promised rows, but for those that end while 32 MiB of such ends wait for it
        (`limits.NOTES_BYTES_MAX`). A Future lets what takes time go on beside what comes next: the hub keeps
        what it has of the request until the Future has a result, and takes an exception in it as one of this method. `close` sees to it that none is left.

        A result says what is stored. Raises as `on_frame` does: after RetryError the same call is made again.
        """
        return None

    def on_action(self, answered: Answered) -> None:
        """An action on a request was applied or rejected: at once when it was asked for through this hub by anyone.

        The steering that a request brings itself, and what controllers do to it inside the workers, is told when the request is over, also of a request
        of which no rows are captured; before `on_request_done`. A consumer with policy `spill` may be told of one again after a kill, by the same id.
        """

    def look(self) -> tuple[str, str] | None:
        """Return where what was consumed lies and a command that shows it, for the table at the end of a run."""
        return None

    def on_idle(self) -> None:
        """Called about four times a second while nothing else is, and between frames."""

    def close(self) -> None:
        """Give back what `open` took; everything delivered was handled before."""


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


class StepView(Protocol):
    """What a controller sees of a step: the rows that its `spec` names."""

    step: int

    def rows(self) -> Iterator[StepRows]:
        """Yield the rows, request by request."""


class Controller(Named, ABC):
    """Runs between two steps, in the worker of the pipeline stage that has the sites it sees; all its sites lie in one stage.

    `State` is what travels from the hub to the workers: `load`, in the hub, makes it of the `Config`
    (and reads the files it names); in the worker the class is made of it.
    """

    Config: ClassVar[type[msgspec.Struct]]
    State: ClassVar[type[msgspec.Struct]]

    @classmethod
    @abstractmethod
    def load(cls, config: Any) -> msgspec.Struct:
        """Return the state; raise UsageError when the configuration cannot work."""

    def __init__(self, state: Any) -> None:
        self.state = state

    @abstractmethod
    def spec(self) -> CaptureSpec:
        """Return the sites and positions that `on_step` is to see, of every request.

        Each such position is seen once: prompts compute those of them that are cached.
        """

    def steers(self) -> Sequence[Site]:
        """Return the sites at which it steers, as far as it knows them, so that what cannot work is refused at the start."""
        return ()

    def open(self, model: ModelInfo) -> None:
        """Raise UsageError when the state does not fit the model."""

    @abstractmethod
    def on_step(self, view: StepView) -> Sequence[Action]:
        """Return the actions (`Steer`, `Unsteer`) that hold from each request's next position on.

        To return an action again that holds already changes nothing. How positions are distributed over steps depends on the batch,
        on `--max-num-batched-tokens` and on drafts: so that what happens to a request does not, every row must count, in
        the order of their positions. After an exception the step's actions are not done.
        """

    def on_request_done(self, request: str) -> None:
        """A request is over; forget it."""


ENTRY_POINT_GROUP = "capflow"

hookspec = pluggy.HookspecMarker("capflow")
hookimpl = pluggy.HookimplMarker("capflow")


@hookspec
def capflow_consumers() -> Sequence[type[Consumer | Controller]]:  # type: ignore[empty-body]
    """Return the consumer and controller classes that the plugin brings.

    Each has a `name` of its own, of letters, digits, `-` and `_`. Two plugins with one name stop the start, as
    does a class that is neither a `Consumer` nor a `Controller`.
    """
