"""The record consumer: whole frames as they came, for `capflow replay`.

`capflow.protocol.recording` is the format. A frame is kept when it has a row that the options describe or that a
request asked for. Events of steering are kept, also of requests without such rows. A frame is kept whole, header and
payload, and once: a frame that is delivered again after a kill is recognised by its number.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from capflow import limits
from capflow.buffers.spool import check_root
from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Form
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.spec import CaptureSpec, read_layers
from capflow.errors import UsageError, explain
from capflow.plugins.consumer import Consumer, Context, hookimpl
from capflow.protocol.recording import Recorder
from capflow.steering.action import Answered


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer record:`.

    path: the recording's directory. It is made when missing; an existing recording is continued.
    hooks, layers, positions: what to capture of every request.
    capture: `requests` to keep only what requests ask for themselves.
    bytes_max: the largest size of the recording, bytes.
    fsync: whether a request is on the disk when its result says `ok`; otherwise it may be with the kernel only.
    """

    path: str
    hooks: list[str] = msgspec.field(default_factory=lambda: ["post_block"])
    layers: list[int | str] | str = "all"
    positions: Form = "all"
    capture: Literal["all", "requests"] = "all"
    bytes_max: int = limits.SPOOL_BYTES_MAX
    fsync: bool = True


class RecordConsumer(Consumer):
    """Keeps frames as they came, for `capflow replay`."""

    name: ClassVar[str] = "record"
    Config: ClassVar[type[msgspec.Struct]] = RecordConfig

    def __init__(self, config: RecordConfig) -> None:
        super().__init__(config)
        self.config: RecordConfig = config
        self._recorder = Recorder(Path(config.path).absolute(), config.bytes_max)
        self._context: Context | None = None

    def spec(self) -> CaptureSpec | None:
        """Return the spec that the options describe; None with `capture=requests`."""
        if self.config.capture == "requests":
            return None
        layers = read_layers(self.config.layers, f"consumers.{self.instance}.layers")
        value = {"hooks": dict.fromkeys(self.config.hooks, layers), "positions": self.config.positions}
        return CaptureSpec.parse(value, where=f"consumers.{self.instance}")

    def check(self) -> None:
        """Raise UsageError for options out of range, and for a path that is no recording or cannot be written."""
        where = f"consumers.{self.instance}"
        if not 0 < self.config.bytes_max <= limits.SPOOL_BYTES_MAX:
            expected, do = f"1..{limits.SPOOL_BYTES_MAX}", "remove it to use the default"
            raise UsageError(explain(f"{where}.bytes_max", got=self.config.bytes_max, expected=expected, do=do))
        path = self._recorder.path
        check_root(path, f"{where}.path")
        if path.is_dir() and any(path.iterdir()) and not (path / "lock").is_file():
            expected = "a recording, an empty directory, or a path that does not exist"
            raise UsageError(explain(f"{where}.path", got=f"{path}, which holds other files", expected=expected))

    def claim(self) -> tuple[str, str]:
        """Return the recording's directory."""
        return "path", str(self._recorder.path.resolve())

    def open(self, context: Context) -> None:
        """Open or make the recording."""
        self._context = context
        self._recorder.open()

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Record the model of the engine."""
        self._recorder.engine(engine, model)

    def on_frame(self, frame: Frame) -> None:
        """Record the frame."""
        if not self._recorder.frame(frame) and self._context is not None:
            self._context.count("frames_again")

    def on_action(self, answered: Answered) -> None:
        """Record an event of steering that is in no recorded frame, such as the outcome of an action."""
        self._recorder.event(answered)

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Record the end of the request; with `fsync`, wait until everything before it is on the disk."""
        self._recorder.done(done, sync=self.config.fsync)
        return CaptureResult("ok", payload={"path": str(self._recorder.path), "rows": done.rows})

    def look(self) -> tuple[str, str]:
        """Return the recording, and the command that replays it."""
        return self.config.path, f"capflow replay {self.config.path} --consumer log"

    def close(self) -> None:
        """Write the rest to the disk."""
        self._recorder.close()


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the record consumer."""
    return [RecordConsumer]
