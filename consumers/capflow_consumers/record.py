"""The record consumer: frames as they came, all that is in them, for `capflow replay`.

`capflow.protocol.recording` is the format. Every frame with a row that the options name, or that a request asked for, is kept whole, header and
payload, once: one that is given again after a kill is known by its number.
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


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer record:`.

    path: the recording's directory, made when missing; one that is there is gone on with.
    hooks, layers, positions: what to capture of every request.
    capture: `requests` to keep only what requests ask for themselves.
    bytes_max: how large the recording may become.
    fsync: whether a request is on the disk, and not only with the kernel, when its result says `ok`.
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
        """Return what the options name, or None with `capture=requests`."""
        if self.config.capture == "requests":
            return None
        layers = read_layers(self.config.layers, f"consumers.{self.instance}.layers")
        value = {"hooks": dict.fromkeys(self.config.hooks, layers), "positions": self.config.positions}
        return CaptureSpec.parse(value, where=f"consumers.{self.instance}")

    def check(self) -> None:
        """Raise UsageError for options out of range, and for a path that is no recording or cannot be written."""
        self.spec()
        where = f"consumers.{self.instance}"
        if not 0 < self.config.bytes_max <= limits.SPOOL_BYTES_MAX:
            expected, do = f"1..{limits.SPOOL_BYTES_MAX}", "remove it to use the default"
            raise UsageError(explain(f"{where}.bytes_max", got=self.config.bytes_max, expected=expected, do=do))
        path = self._recorder.path
        check_root(path, f"{where}.path")
        if path.is_dir() and any(path.iterdir()) and not (path / "lock").is_file():
            expected = "a recording, or a directory that is empty or not there"
            raise UsageError(explain(f"{where}.path", got=f"{path}, with something else in it", expected=expected))

    def claim(self) -> tuple[str, str]:
        """Return the recording's directory."""
        return "path", str(self._recorder.path.resolve())

    def open(self, context: Context) -> None:
        """Take the directory."""
        self._context = context
        self._recorder.open()

    def on_session(self, engine: str, model: ModelInfo) -> None:
        """Note which model the frames are of."""
        self._recorder.engine(engine, model)

    def on_frame(self, frame: Frame) -> None:
        """Keep the frame."""
        if not self._recorder.frame(frame) and self._context is not None:
            self._context.count("frames_again")

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        """Note the end, and have everything before it on the disk."""
        self._recorder.done(done, sync=self.config.fsync)
        return CaptureResult("ok", payload={"path": str(self._recorder.path), "rows": done.rows})

    def look(self) -> tuple[str, str]:
        """Return the recording, and the command that says it again."""
        return self.config.path, f"capflow replay {self.config.path} --consumer log"

    def close(self) -> None:
        """Have the rest on the disk."""
        self._recorder.close()


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the record consumer."""
    return [RecordConsumer]
