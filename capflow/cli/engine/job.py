"""The model job of `capflow run`: a child process runs the engine over a file of prompts; this side watches it.

The child is `python -m capflow_engine.jobs.batch`. So this process needs neither torch nor vLLM, and the hub's threads
share no interpreter with the engine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from capflow import limits
from capflow.capture.losses import MEANT, described
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import Capture, CaptureByConsumer, Wanted, join
from capflow.cli.engine.prompts import Prompt
from capflow.cli.engine.summary import print_summary
from capflow.cli.fitted import LineOfParts
from capflow.cli.hub.running import HubRun
from capflow.cli.units import human_bytes
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.text.engine_name import new_engine
from capflow.transport.client import Client

_STILL_S_MAX = 120.0  # consumers without progress are waited for so long
_CAUSE = re.compile(r"^\(\w[^)]*\) ERROR [^\]]*\] (\w+(?:Error|Exception): .+)$", re.MULTILINE)
# Between two lines of progress where there is no terminal.
_PLAIN_S = 10.0
# Lines about what is missing; the rest is counted.
_MISSING_MAX = 20


def parse_pairs(pairs: tuple[str, ...], option: str) -> dict[str, Any]:
    """Return `NAME=VALUE` pairs as a dict; a value is read as JSON where it is JSON, else as text."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(explain(option, got=pair, expected="NAME=VALUE"))
        try:
            parsed[name] = json.loads(value)
        except (ValueError, RecursionError):
            parsed[name] = value
    return parsed


@dataclass
class ModelJob:
    """One run of a model over prompts, in a child process, from `start` to `finish`.

    stage: what the child does now.
    notices: messages of the child for the user, in order, until they are shown.
    done: its finished requests, in order. The thread that reads the child's events writes it.
    """

    model: str
    prompts: list[Prompt]
    sites: tuple[str, ...]
    max_tokens: int
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    # The hub's key, if it has one. The engine and this side use it too.
    key: str | None = None
    # What workers do when their queue is full: `policy`, `spool_dir`, ….
    outbound: dict[str, Any] = field(default_factory=dict)
    # Where the prompts came from, for messages.
    prompts_file: str = ""
    # What steers every prompt and what prompts may name: the options `steering`, `steering_modules`,
    # `saes`, `steering_bank_bytes`, `steer_sites` and `on_divergence`.
    steering: dict[str, Any] = field(default_factory=dict)
    # The engine's name; None for a random one.
    engine_name: str | None = None
    # The address, known once the hub listens.
    hub: str = ""
    stage: str = "starting"
    notices: deque[str] = field(default_factory=deque)
    # Layers and tapped sites, known before the model is loaded.
    shape: tuple[int, tuple[Site, ...]] | None = None
    info: ModelInfo | None = None
    done: list[dict[str, Any]] = field(default_factory=list)
    # How long the requests took, once all are done.
    generated_s: float | None = None
    # Whether the model is loaded and the prompts run.
    ready: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _reader: threading.Thread | None = None
    _error: CapflowError | None = None
    _log: Path | None = None

    def __post_init__(self) -> None:
        self.engine_id = new_engine(self.engine_name, where="--engine-name")

    def check(self) -> None:
        """Raise UsageError for a model that is wrong before anything is started."""
        require("vllm", "--model")
        path = Path(self.model)
        local = path.exists() or self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        if local and not (path / "config.json").is_file():
            expected = "a directory with a config.json, a model's name, or `demo`"
            raise UsageError(explain("--model", got=self.model, expected=expected))

    def start(self, umask: int) -> None:
        """Start the child with a umask: what it downloads may be shared, as the hub's files may not."""
        log = tempfile.NamedTemporaryFile(prefix="capflow-engine-", suffix=".log", delete=False)  # noqa: SIM115
        self._log = Path(log.name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "capflow_engine.jobs.batch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            umask=umask,
        )
        log.close()
        assert self._process.stdin is not None
        asked = {
            "model": self.model,
            "prompts": self.prompts,
            "prompts_file": self.prompts_file,
            "hub": self.hub,
            "key": self.key,
            "sites": self.sites,
            "max_tokens": self.max_tokens,
            "engine": self.engine,
            "sampling": self.sampling,
            **self.steering,
            "engine_id": self.engine_id,
            **self.outbound,
        }
        # `finish` reports a child that died.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(msgspec.json.encode(asked))
        self._reader = threading.Thread(target=self._read, name="capflow-job", daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the child still runs."""
        return self._reader is not None and self._reader.is_alive()

    @property
    def tokens(self) -> int:
        """How many tokens were generated by finished requests."""
        return sum(int(d["tokens"]) for d in self.done)

    def stop(self, hurry: threading.Event) -> None:
        """End the child and every process that it started.

        The child sends the rows that it has, unless `hurry` is set.
        """
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + limits.JOB_END_S_MAX
        while self._process.poll() is None and time.monotonic() < deadline and not hurry.wait(limits.IDLE_S):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def forget_log(self) -> None:
        """Remove the child's log: no message names it."""
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def finish(self) -> None:
        """Wait for the end of the child; raise its error, if it failed."""
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
        self.forget_log()

    def _see_log(self) -> str:
        return f"see {self._log}"

    def _root_cause(self) -> str | None:
        """Return the error of a process of the engine that died; the engine itself reports only that one died."""
        text = self._log.read_text(errors="replace") if self._log is not None else ""
        causes = [m.group(1) for m in _CAUSE.finditer(text) if "ngine core" not in m.group(1)]
        return explain("the engine failed", got=causes[0]) if causes else None

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            match event.get("event"):
                case "model":
                    self.shape = int(event["num_layers"]), tuple(Site(*site) for site in event["sites"])
                case "preparing":
                    self.stage = str(event["stage"])
                case "notice":
                    self.notices.append(str(event["message"]))
                case "ready":
                    self.info = msgspec.convert(event["info"], ModelInfo)
                    self.stage, self.ready = "running", True
                case "done":
                    self.done.append(event)
                case "end":
                    self.stage, self.generated_s = "done", float(event["seconds"])
                case "error":
                    message = str(event["message"])
                    if event["usage"]:
                        self._error = UsageError(message)
                    else:
                        self._error = CapflowError(f"{self._root_cause() or message}; {self._see_log()}")


def run_job(running: HubRun, job: ModelJob, *, stay: bool = False) -> int:
    """Run a job with a hub beside it, show its progress, and print a summary at the end.

    stay: run the hub on after the job until a signal comes, for consumers that show something.

    Return the exit code: 0 only if every row arrived that the consumers' specs promise; 130 or 143 when a signal
    interrupted the job.
    Raises UsageError and CapflowError when the job could not be done.
    """
    _check_names(running, job)
    with running:
        job.hub = running.hub.address
        job.start(running.umask_before)
        try:
            _watch(running, job)
            interrupted = running.stopped.is_set()
            if not interrupted:
                job.finish()
                results = _results(job)
        finally:
            job.stop(running.signals.second)
        if stay and not interrupted:
            text = f"{len(job.done)} prompts are through; the consumers run until Ctrl-C"
            running.tell("staying", text, prompts=len(job.done))
            running.tell_addresses()
            running.wait()
    if interrupted:
        job.forget_log()
        running.tell("interrupted", "interrupted; what was captured until then is complete, request by request")
        return running.signals.exit_code
    missing = _missing(running, job, results)
    assert job.generated_s is not None
    received = running.hub.received_of(job.engine_id)
    print_summary(running, job.done, job.generated_s, results, received)
    if others := running.hub.snapshot().rows - received.rows:
        # The consumers have them as well: whatever comes to a hub's address is for its consumers.
        running.tell("others", f"{others} rows came from other engines, which send to the same address", rows=others)
    for line in missing[:_MISSING_MAX]:
        running.tell("missing", line, style="red")
    if (more := len(missing) - _MISSING_MAX) > 0:
        running.tell("missing", f"and {more} more", style="red")
    return 1 if missing else running.exit_code


def _watch(running: HubRun, job: ModelJob) -> None:
    """Show progress until the job's child has ended or a signal came."""
    console = running.console
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    task = bar.add_task(job.stage, total=len(job.prompts))
    with Live(bar, console=console, transient=True) if console.is_terminal else contextlib.nullcontext() as live:
        begun, shown_at = time.monotonic(), -_PLAIN_S
        checked = False
        while job.running and not running.stopped.wait(limits.IDLE_S):
            _show_notices(running, job)
            if not checked and job.shape is not None:
                _check_specs(running, job, *job.shape)
                checked = True
            _check_refusals(running, job)
            rates = _rates(running, job)
            now = time.monotonic()
            if live is not None:
                bar.update(task, description=job.stage, completed=len(job.done))
                live.update(Group(bar, LineOfParts(*rates)))
            elif now - shown_at >= _PLAIN_S:
                _show_line(running, job, rates, now - begun)
                shown_at = now
    _show_notices(running, job)
    _check_refusals(running, job)


def _check_refusals(running: HubRun, job: ModelJob) -> None:
    """Raise UsageError if the hub has refused the job's own engine."""
    for engine, reason in running.refusals:
        if engine == job.engine_id:
            raise UsageError(reason)


def _show_notices(running: HubRun, job: ModelJob) -> None:
    while job.notices:
        running.tell("notice", job.notices.popleft())


def _show_line(running: HubRun, job: ModelJob, rates: list[str], seconds: float) -> None:
    """Print a line of progress where there is no terminal. The seconds make each line new, also while nothing moves."""
    of = f", {len(job.done)} of {len(job.prompts)} requests" if job.ready else ""
    line = "  ".join([f"{job.stage}{of}, {seconds:.0f} s", *rates])
    done, total = len(job.done), len(job.prompts)
    running.tell("progress", line, stage=job.stage, done=done, of=total, seconds=round(seconds, 1))


def _check_names(running: HubRun, job: ModelJob) -> None:
    """Raise UsageError when a prompt's capture names a consumer that is not here or reads no requests."""
    readers = {consumer.name for consumer in running.hub.consumers if consumer.consumer.reads_requests}
    for prompt in job.prompts:
        capture = prompt.asked
        named = set(capture.by_name) if isinstance(capture, CaptureByConsumer) else set()
        if strangers := sorted(named - readers):
            expected = f"one of {', '.join(sorted(readers)) or 'none, for no consumer reads requests'}"
            raise UsageError(explain(f"prompt {prompt.id}, capture", got=f"consumer {strangers[0]}", expected=expected))


def _check_specs(running: HubRun, job: ModelJob, num_layers: int, sites: tuple[Site, ...]) -> None:
    """Raise UsageError when a consumer, a controller or a prompt wants what the model does not have."""
    for prompt in job.prompts:
        if (asked := prompt.asked) is not None:
            asked.resolve(sites, num_layers=num_layers, where=f"prompt {prompt.id}, capture")
    running.check_specs(num_layers, sites)


def _rates(running: HubRun, job: ModelJob) -> list[str]:
    """Return the rates of the last seconds and the sums; nothing before the model is loaded."""
    now, rate = running.hub.snapshot(), running.rate()
    if not job.ready:
        return []
    return [
        f"{rate.tokens:.0f} tok/s",
        f"{rate.rows:.0f} rows/s",
        f"{human_bytes(rate.bytes)}/s",
        f"queued {human_bytes(now.queued_bytes)}",
        f"dropped {now.rows_lost}",
        f"spilled {now.spilled}",
    ]


def _results(job: ModelJob) -> dict[str, dict[str, CaptureResult]]:
    """Return the consumers' results of every request, once all consumers are done with all of them."""
    with Client(job.hub, key=job.key, insecure=True) as client:
        return client.final_results([p.id for p in job.prompts], _STILL_S_MAX, engine=job.engine_id)


def _resolved(capture: Capture | None, info: ModelInfo) -> Wanted:
    return {} if capture is None else capture.resolve(info.sites, num_layers=info.num_layers)


def _wanted(running: HubRun, own: dict[str, Wanted], prompt: Prompt, info: ModelInfo) -> dict[str, Wanted]:
    """Return the rows that each consumer should get of a prompt: by its own spec and by the prompt's."""
    capture = prompt.asked
    if capture is None:
        return own
    readers = (consumer for consumer in running.hub.consumers if consumer.consumer.reads_requests)
    asked = {consumer.name: _resolved(capture.of(consumer.name), info) for consumer in readers}
    return {name: join((wanted, asked.get(name, {}))) for name, wanted in own.items()}


def _missing(running: HubRun, job: ModelJob, results: dict[str, dict[str, CaptureResult]]) -> list[str]:
    """Return the rows and results that are missing, counted here from the specs; no report is believed."""
    assert job.info is not None
    own = {consumer.name: _resolved(consumer.spec, job.info) for consumer in running.hub.consumers}
    lines = []
    answered = {str(d["id"]): d for d in job.done}
    total = 0
    for prompt in job.prompts:
        done = answered.get(prompt.id)
        if done is None:
            lines.append(f"request {prompt.id}: no answer")
            continue
        wanted = _wanted(running, own, prompt, job.info)
        computed = int(done["prompt_tokens"]) + int(done["tokens"]) - 1
        count = {
            name: sum(w.positions.count(int(done["prompt_tokens"]), computed) for w in sites.values())
            for name, sites in wanted.items()
        }
        total += sum(w.positions.count(int(done["prompt_tokens"]), computed) for w in join(wanted.values()).values())
        for name, rows in count.items():
            result = results.get(prompt.id, {}).get(name)
            if result is not None and _only_skipped(result):
                continue
            if rows and (result is None or result.status != "ok"):
                why = "no result" if result is None else ": ".join(filter(None, (result.status, result.error)))
                lines.append(f"request {prompt.id}, {name}: {why}")
            elif result is not None and result.payload.get("rows", rows) != rows:
                lines.append(f"request {prompt.id}, {name}: got {result.payload['rows']} rows, expected {rows}")
    received = running.hub.received_of(job.engine_id).rows
    if received != total:
        lines.append(f"rows received: got {received}, expected {total} as the specs and the answers' lengths say")
    return lines


def _only_skipped(result: CaptureResult) -> bool:
    """Return whether a result lacks only rows that a live consumer skipped."""
    reasons = {each.reason for each in result.dropped}
    return bool(reasons) and reasons <= MEANT and result.error == "; ".join(map(described, result.dropped))
