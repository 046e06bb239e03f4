"""Logs of a command that runs: text for people, or one JSON object a line for machines.

Each JSON line has `time` (UTC, RFC 3339), `level` (`info`, `warning`, `error`), `logger`, `event` and `message`. The
name of an event and its other fields are stable; messages are for people. The keys of a record's `extra` become fields,
and a traceback becomes `exception`.

Invariant: no value in a record starts a line of its own or moves a terminal, whoever chose the value. JSON lines are
ASCII. In text, characters that cannot be printed are escaped, and the lines of a traceback are indented.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from capflow.errors import CapflowError, UsageError
from capflow.text.printable import printable

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")

logger = logging.getLogger("capflow.run")

_OF_ANY_RECORD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
_TRACEBACK_LENGTH_MAX = 16_384
_DROPPED = "%d lines of the log are dropped: nobody read them in time"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _OF_ANY_RECORD and key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_TRACEBACK_LENGTH_MAX:]
        return _ascii(line)


def _ascii(line: dict[str, Any]) -> str:
    return json.dumps(line, default=str).replace("\x7f", r"\u007f")


def dropped_as_json(lines: int) -> str:
    """Return the JSON line for a number of lines that were dropped because nobody read them in time."""
    record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, _DROPPED, (lines,), None)
    record.__dict__ |= {"event": "log_dropped", "lines": lines}
    return JsonFormatter().format(record) + "\n"


def dropped_as_text(lines: int) -> str:
    """Return the same as `dropped_as_json`, as text."""
    return f"capflow: {_DROPPED % lines}\n"


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text, and its traceback as indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        lines = [f"capflow: {printable(record.getMessage())}"]
        if record.exc_info:
            trace = self.formatException(record.exc_info)[-_TRACEBACK_LENGTH_MAX:]
            lines += [f"  {printable(line)}" for line in trace.split("\n")]
        return "\n".join(lines)


class _JsonHandler(logging.StreamHandler[TextIO]):
    """Writes each record to a file as one line of JSON."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file)
        self.setFormatter(JsonFormatter())


class _TextHandler(logging.Handler):
    """Prints records above the live line, if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(Text(self.format(record)), soft_wrap=True)


@contextlib.contextmanager
def logs_to(console: Console, log_format: Format, file: TextIO | None = None) -> Iterator[None]:
    """Show capflow's log records of level INFO and above; with JSON also other libraries' warnings.

    file: the destination of JSON lines; standard error by default.
    """
    handler = _TextHandler(console) if log_format == "text" else _JsonHandler(file or sys.stderr)
    ours, root = logging.getLogger("capflow"), logging.getLogger()
    target = ours if log_format == "text" else root
    level, hook = ours.level, threading.excepthook
    target.addHandler(handler)
    ours.setLevel(logging.INFO)
    if log_format == "json":
        threading.excepthook = _log_death
    try:
        yield
    finally:
        target.removeHandler(handler)
        ours.setLevel(level)
        threading.excepthook = hook


def _log_death(args: threading.ExceptHookArgs) -> None:
    """Log the exception that ended a thread."""
    name = args.thread.name if args.thread is not None else "a thread"
    error = args.exc_value or args.exc_type()
    logger.critical("%s ended", name, exc_info=error, extra={"event": "thread_ended", "ended": name})


@contextlib.contextmanager
def failures_as_json() -> Iterator[None]:
    """Log a command's error as the last line of its JSON log; the exit code stays the same."""
    try:
        yield
    except CapflowError as e:
        extra = {"event": "failed"}
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, str(e), (), None, extra=extra)
        print(JsonFormatter().format(record), file=sys.stderr)
        sys.exit(2 if isinstance(e, UsageError) else 1)
