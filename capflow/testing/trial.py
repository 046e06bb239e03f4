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
    """The consumer under test and how to run it; `conformance` describes the fields."""

    consumer: type[Consumer]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: ModelInfo = field(default_factory=make_model)
    kept: Callable[[], Mapping[str, Any]] | None = None
    handle_s_max: float = 5.0

    def configured(self, *, spool: str = "spool", **options: Any) -> ConfiguredConsumer:
        """Return a new consumer, as `--consumer` makes it.

        spool: the spool directory, if the consumer spills.
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
        """The spec of each request: every site, or None if the consumer has a spec of its own."""
        if self.configured().spec is not None:
            return None
        hooks = sorted({site.hook for site in self.model.sites})
        return CaptureSpec(hooks=dict.fromkeys(hooks, "all"))

    def read(self) -> Mapping[str, Any]:
        """Return the stored data of each request by id; nothing if there is no `kept`."""
        return self.kept() if self.kept is not None else {}


class Trial:
    """A running hub with the consumer, in the trial's own current directory."""

    def __init__(self, subject: Subject, hub: MemoryHub) -> None:
        self.subject = subject
        self.hub = hub

    def engine(self, name: str = "engine-1", **options: Any) -> Engine:
        """Return an engine with the model of the rules."""
        return self.hub.engine(name, **({"model": self.subject.model, "capture": self.subject.capture} | options))

    def result(self, request: str) -> CaptureResult:
        """Return the result of a request."""
        return self.hub.result(request)


class Torn(Frame):
    """A frame that cannot be read after its first chunk or block."""

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
    """A frame for which memory runs out after its first chunk or block."""

    __slots__ = ()

    def _error(self) -> Exception:
        return MemoryError("no memory to read this frame any further")


class _Failures(logging.Handler):
    """Collects the consumer's exceptions from the hub's log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.lines.append(f"{getattr(record, 'method', '')}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def trial(subject: Subject, directory: Path, *, errors_max: int = 0, **options: Any) -> Iterator[Trial]:
    """Run the consumer in a directory, which is made if it is missing.

    At the end assert that the consumer raised at most `errors_max` times, handled all frames and closed in time.
    """
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
        lines = "; ".join(failures.lines)
        assert hub.lanes[0].errors <= errors_max, f"the consumer raised {hub.lanes[0].errors} times: {lines}"
        assert drained, "the consumer did not handle everything and close in time"


def outcome(trial: Trial, request: str) -> Any:
    """Return a request's result without values that differ between runs; a text with a slash counts as a path."""
    return _comparable(msgspec.to_builtins(trial.result(request), enc_hook=str))


def _comparable(value: Any) -> Any:
    match value:
        case dict():
            return {key: _comparable(held) for key, held in value.items()}
        case list() | tuple():
            return [_comparable(held) for held in value]
        case str() if "/" in value:
            return "a path"
        case float():
            return float(f"{value:.4g}")  # sums differ in their last digits by the order of their terms
    return value
