"""The model job of `capflow run`: a child process runs the engine over a file of prompts; this side watches it.

The child is `python -m capflow_engine.batch`, so that this process needs neither torch nor vLLM and the hub's threads share no
interpreter with the engine's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a prompts file: `{"id": …, "prompt": …, "max_tokens": …}`; max_tokens may be left out."""

    id: str
    prompt: str
    max_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a JSON Lines file.

    Raises UsageError naming the file and the line when it cannot be read, a line is not a prompt, or an id comes twice.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UsageError(explain(f"--prompts {path}", got=e.strerror or str(e), expected="a readable file")) from e
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.MsgspecError as e:
            raise UsageError(explain(where, got=str(e), expected='{"id": "…", "prompt": "…"}')) from e
        if not prompt.prompt or not 0 < len(prompt.id) <= limits.REQUEST_ID_LENGTH_MAX:
            expected = f"a prompt that is not empty and an id of 1..{limits.REQUEST_ID_LENGTH_MAX} characters"
            raise UsageError(explain(where, got=line.decode(errors="replace"), expected=expected))
        if prompt.max_tokens is not None and prompt.max_tokens < 1:
            raise UsageError(explain(f"{where}, max_tokens", got=prompt.max_tokens, expected="1 or more"))
        if prompt.id in seen:
            raise UsageError(explain(f"{where}, id", got=prompt.id, expected=f"another than in line {seen[prompt.id]}"))
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UsageError(explain(f"--prompts {path}", got="no prompts", expected="one JSON object a line"))
    return prompts


def parse_pairs(pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """Return `NAME=VALUE` pairs as a dict; a value is read as JSON where it is JSON, else as text."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(explain(option, got=pair, expected="NAME=VALUE"))
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


@dataclass
class ModelJob:
    """One run of a model over prompts, in a child process, from `start` to `finish`.

    stage: what the child is at. done: its finished requests, in order, as it tells of them. Written by the
    thread that reads the child's events, read by whoever shows progress.
    """

    model: str
    prompts: list[Prompt]
    hub: str
    sites: tuple[str, ...]
    max_tokens: int
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    stage: str = "starting"
    done: list[dict[str, Any]] = field(default_factory=list)
    generated_s: float | None = None  # how long the requests took, once all are done
    ready_at: float | None = None  # when the engine took its first request, on the monotonic clock
    _process: subprocess.Popen[bytes] | None = None
    _reader: threading.Thread | None = None
    _error: CapflowError | None = None
    _log: Path | None = None

    def start(self) -> None:
        """Start the child.

        Raises UsageError when no engine is installed.
        """
        if find_spec("vllm") is None:
            do = "pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]'"
            raise UsageError(explain("--model: vLLM is not installed", do=do))
        log = tempfile.NamedTemporaryFile(prefix="capflow-engine-", suffix=".log", delete=False)  # noqa: SIM115
        self._log = Path(log.name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "capflow_engine.batch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        assert self._process.stdin is not None
        self._process.stdin.write(
            msgspec.json.encode(
                {
                    "model": self.model,
                    "prompts": self.prompts,
                    "hub": self.hub,
                    "sites": self.sites,
                    "max_tokens": self.max_tokens,
                    "engine": self.engine,
                    "sampling": self.sampling,
                }
            )
        )
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, name="capflow-job", daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the child is still there."""
        return self._reader is not None and self._reader.is_alive()

    @property
    def tokens(self) -> int:
        """How many tokens were generated by finished requests."""
        return sum(int(d["tokens"]) for d in self.done)

    def stop(self) -> None:
        """End the child and everything it started, whatever it is at."""
        if self._process is None or self._process.poll() is not None:
            return
        import contextlib
        import os
        import signal

        for which, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, which)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break

    def finish(self) -> None:
        """Wait for the end of the child; raise what it failed with, if it did."""
        assert self._process is not None
        assert self._reader is not None
        self._reader.join()
        code = self._process.wait()
        if self._error is None and (code != 0 or self.generated_s is None):
            got = f"exit code {code}"
            self._error = CapflowError(
                explain("the engine ended before its work was done", got=got, do=self._see_log())
            )
        if self._error is not None:
            raise self._error
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def _see_log(self) -> str:
        return f"see {self._log}"

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            match event.get("event"):
                case "loading":
                    self.stage = "loading the model"
                case "preparing":
                    self.stage = str(event["what"])
                case "ready":
                    self.stage, self.ready_at = "running", time.monotonic()
                case "done":
                    self.done.append(event)
                case "end":
                    self.stage, self.generated_s = "done", float(event["seconds"])
                case "error":
                    message = str(event["message"])
                    if event["usage"]:
                        self._error = UsageError(message)
                    else:
                        self._error = CapflowError(f"{message}; {self._see_log()}")
