"""A contender's process: its turns, its time, its memory, and its end.

A process leads a group and a session of its own. Every wait has a limit; a process that crashed, hung or answered
wrongly raises `FailedError` with one line, and is ended with all its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

PROGRAMS = Path(__file__).parent / "programs"
SAMPLE_S = 0.25
_ERROR = re.compile(r"\b(\w*(?:Error|Exception)): (.+)")
_FOLLOWS = re.compile(r"See root cause|See stack trace|cancelled|died unexpectedly|Executor failed")
_KILLED = re.compile(r"\S+ died unexpectedly \(exit code: -9\)")


class FailedError(Exception):
    """A contender did not do its work; the message is one line."""


class Turn(NamedTuple):
    """What a turn cost: wall seconds, and CPU seconds of all its processes."""

    seconds: float
    cpu_seconds: float


class Process:
    """A contender that runs.

    python: of its environment.
    log: where its stderr goes.
    limit_s: how long it may take to load, and for each turn.
    """

    def __init__(self, python: Path, program: str, job: Mapping[str, Any], log: Path, limit_s: float) -> None:
        self.limit_s, self.log = limit_s, log
        self._buffer = b""
        self._stderr = log.open("wb")
        environment = _environment(python)
        self._process = subprocess.Popen(
            [str(python), str(PROGRAMS / f"{program}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
        self._ask(job)

    def turn(self, number: int) -> tuple[list[list[int]], Turn]:
        """Run a turn; return its tokens and its cost."""
        cpu, begin = self.cpu_seconds(), time.perf_counter()
        tokens = self._ask({"turn": number})["tokens"]
        return tokens, Turn(time.perf_counter() - begin, self.cpu_seconds() - cpu)

    def save(self, path: Path) -> None:
        """Write the rows of the last turn to a file of numpy's."""
        self._ask({"save": str(path)})

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes, those that ended and were waited for among them."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory_bytes(self) -> int:
        """Return the memory of all processes, pages that some share counted once (PSS)."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        return total

    def close(self) -> None:
        """End all processes: ask the first, then kill what is left."""
        tree = self._tree()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._kill(tree)

    def _tree(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def _kill(self, tree: list[psutil.Process]) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process whose parent died is in no tree, but still of the session.
        for process in (*tree, *filter(self._is_ours, psutil.process_iter())):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        self._stderr.close()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self._process.pid
        except OSError:
            return False

    def _ask(self, line: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer()
        except BaseException:
            self._kill(self._tree())
            raise
        if "error" in answer:
            self._kill(self._tree())
            raise FailedError(reason_of(answer["error"], self.log))
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        file, end = self._process.stdout.fileno(), time.monotonic() + self.limit_s
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                raise FailedError(f"no answer within {self.limit_s:.0f} s")
            part = os.read(file, 1 << 20)
            if not part:
                raise FailedError(reason_of(f"its process ended with {self._process.wait()}", self.log))
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class MemoryPeak:
    """The largest memory of a process while a block runs, of samples four times a second.

    kept: a directory whose files are in memory, too.
    """

    def __init__(self, process: Process, kept: Path) -> None:
        self._process, self._kept = process, kept
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._process.memory_bytes() + size_of(self._kept))


def size_of(directory: Path) -> int:
    """Return how many bytes the files below a directory take."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def reason_of(message: str, log: Path) -> str:
    """Return why a contender failed, in one line: the last error of its log that is not a consequence of another.

    message: what its process said, which is often only that another process failed.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    causes = [match.groups() for match in map(_ERROR.search, text.splitlines()) if match]
    causes = [cause for cause in causes if not _FOLLOWS.search(cause[1])]
    plain = _ERROR.search(message)
    if plain and not _FOLLOWS.search(message):
        causes.append((plain[1], plain[2]))
    line = f"{causes[-1][0]}: {causes[-1][1]}" if causes else message
    if not causes and (killed := _KILLED.search(text)):
        line = f"{killed[0]}: killed, as Linux does where no memory is left"
    line = " ".join(line.split())
    return line if len(line) <= 200 else f"{line[:197]}..."


def _environment(python: Path) -> dict[str, str]:
    """Return the environment variables of a contender's process."""
    environment = dict(os.environ)
    if python != Path(sys.executable):
        environment.pop("PYTHONPATH", None)
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{python.parent}{os.pathsep}{environment.get('PATH', '')}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
