"""A trial: one run of the consumer under test in a real hub, in a directory of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from capflow.capture.frame import Block, Chunk, Frame, Rows
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.plugins.configure import ConfiguredConsumer, configure
from capflow.plugins.consumer import Consumer
from capflow.testing.frames import make_model
from capflow.testing.hub import Engine, MemoryHub


@dataclass(frozen=True)
class Subject:
    """A consumer, and how the rules run it; see `conformance`."""

    consumer: type[Consumer]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: ModelInfo = field(default_factory=make_model)
    kept: Callable[[], Mapping[str, Any]] | None = None
    handle_s_max: float = 5.0

    def configured(self, *, spool: str = "spool", **options: Any) -> ConfiguredConsumer:
        """Return a new one, as `--consumer` makes it.

        spool: where it spills to, if it does.
        """
        name = self.consumer.name
        given = dict(self.options) | options
        if given.get("policy", self.consumer.policy) == "spill":
            given.setdefault("spool_dir", spool)
        made = configure(name, given, {name: self.consumer})
        assert isinstance(made, ConfiguredConsumer)
        return made

    @property
    def capture(self) -> CaptureSpec | None:
        """What requests bring: nothing, unless the consumer wants nothing else."""
        if self.configured().consumer.spec() is not None:
            return None
        hooks = sorted({site.hook for site in self.model.sites})
        return CaptureSpec(hooks=dict.fromkeys(hooks, "all"))

    def read(self) -> Mapping[str, Any]:
        """Return what is kept of each request, as `kept` reads it; nothing without one."""
        return self.kept() if self.kept is not None else {}


class Trial:
    """A running hub with the consumer; the current directory is the trial's own."""

    def __init__(self, subject: Subject, hub: MemoryHub) -> None:
        self.subject = subject
        self.hub = hub

    def engine(self, name: str = "engine-1", **options: Any) -> Engine:
        """Return an engine with the model that the rules use."""
        return self.hub.engine(name, **({"model": self.subject.model, "capture": self.subject.capture} | options))

    def result(self, request: str) -> CaptureResult:
        """Return what became of a request."""
        return self.hub.result(request)


class Torn(Frame):
    """A frame that cannot be read behind its first chunk, or block."""

    __slots__ = ()

    def _error(self) -> Exception:
        return RuntimeError("this frame cannot be read any further")

    def blocks(self) -> Iterator[tuple[Block, Rows]]:
        """Yield the first block, and raise."""
        yield from itertools.islice(super().blocks(), 1)
        raise self._error()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the first chunk, and raise."""
        yield from itertools.islice(Frame(self.header, self.payload, self.wants).chunks(), 1)
        raise self._error()


class Short(Torn):
    """A frame for which there is no memory now, behind its first chunk, or block."""

    __slots__ = ()

    def _error(self) -> Exception:
        return MemoryError("no memory to read this frame any further")


class _Failures(logging.Handler):
    """Keeps what the hub logs of exceptions of the consumer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.said.append(f"{getattr(record, 'method', '')}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def trial(subject: Subject, directory: Path, *, errors_max: int = 0, **options: Any) -> Iterator[Trial]:
    """Run the consumer in a directory, which is made when missing. When it is over, no more may have been raised, and nothing left undone."""
    failures = _Failures()
    logger = logging.getLogger("capflow.consumer")
    directory.mkdir(exist_ok=True)
    with contextlib.chdir(directory):
        hub = MemoryHub(subject.configured(**options))
        logger.addHandler(failures)
        try:
            with hub:
                yield Trial(subject, hub)
                drained = hub.stop()
        finally:
            logger.removeHandler(failures)
        said = "; ".join(failures.said)
        assert hub.lanes[0].errors <= errors_max, f"the consumer raised {hub.lanes[0].errors} times: {said}"
        assert drained, "the consumer did not handle everything and close in time"


def outcome(trial: Trial, request: str) -> Any:
    """Return a request's result, without what differs from run to run: texts with a slash are taken for places."""
    return _comparable(msgspec.to_builtins(trial.result(request), enc_hook=str))


def _comparable(value: Any) -> Any:
    match value:
        case dict():
            return {key: _comparable(held) for key, held in value.items()}
        case list() | tuple():
            return [_comparable(held) for held in value]
        case str() if "/" in value:
            return "a place"
        case float():
            return float(f"{value:.4g}")  # sums differ in their last digits by the order of their terms
    return value
