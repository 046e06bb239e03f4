"""Kills the hub and the engine side at random moments under load; checks that nothing is lost, repeated or changed.

    make chaos          (or: python -m tests.chaos [--kills-hub N] [--kills-engine N] [--kills-both N]
                             [--disk-full N] [--rate N] [--seed N] …)

There are four processes: a worker over a real link that spills (`tests.chaos.engine`); a second worker with rows of
another width, which is never killed; `capflow run` with the consumers; and this one. This process kills and restarts
the others, and fills the consumers' disk for some seconds (a file system of its own, if one can be mounted). From the
log that the worker writes before it sends, it knows what must be stored (`tests.chaos.oracle`). After each restart, a
frame that was sent after it must be acknowledged within 5 seconds. While hubs are killed all the time, the requests of
dead engines are not ended, and consumers' inboxes hold all of them; so the killing pauses before an inbox is full. The
exit code is 1 if there is any fault. The same seed makes the same choices.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from capflow import limits
from capflow.errors import CapflowError
from capflow.probes.probe import Probe
from capflow.transport.client import Client
from tests.chaos.oracle import DuckdbCheck, FilesystemCheck, Log, Oracle
from tests.chaos.rows import BESIDE_HIDDEN, HIDDEN, SITES
from tests.kit.revision import revision

HERE = Path(__file__).parent
DRAIN_S_MAX = 180.0
POLL_S = 0.02
QUIET_S = 2.0
DATA_BYTES_MAX = 512 * limits.MIB  # of the consumers' file system
INBOX_BYTES_MAX = limits.SPOOL_BYTES_DEFAULT // 4  # of a consumer; above, no kills until it is half of that
OFF = ("lost", "repeated", "wrong", "unnamed", "late", "failed")


@dataclass
class Options:
    """The kills and the load.

    kills: the number of kills of each part.
    disk_full: how often the consumers' disk is full for some seconds.
    rate: frames per second.
    consumers: `filesystem`, `duckdb` or both.
    pause_s: the time between a return and the next kill.
    full_s: the time for which the disk is full.
    down_s: the time between a kill and the restart.
    return_s_max: the maximum time from a restart until a frame that was sent after it is acknowledged.
    keep: keep all files.
    forget: remove a request's directory after it is checked.
    length_max: the maximum number of tokens that a request generates.
    hostile: whether peers that break the protocol run at the same time.
    tell: prints a line.
    """

    kills: dict[str, int] = field(default_factory=lambda: {"hub": 50, "engine": 20, "both": 10})
    disk_full: int = 10
    rate: float = 2000.0
    seed: int = 0
    consumers: tuple[str, ...] = ("filesystem",)
    policy: str = "spill"
    pause_s: tuple[float, float] = (0.3, 3.0)
    full_s: tuple[float, float] = (1.0, 6.0)
    down_s: tuple[float, float] = (0.0, 0.5)
    return_s_max: float = 5.0
    keep: bool = False
    forget: bool = False
    length_max: int = 200
    hostile: bool = False
    tell: Callable[[str], None] = print


class Chaos:
    """The processes, from `start` to `stop`; everything lies below `directory`."""

    command = ("-m", "capflow", "run")  # of the hub, for Python

    def __init__(self, directory: Path, options: Options) -> None:
        self.directory, self.options = directory, options
        self.choose = random.Random(options.seed)
        self.address = f"ipc://{directory}/h"
        self.log = Log(directory / "engine.log")
        self.oracle = Oracle(self.log)
        self.checks: list[FilesystemCheck | DuckdbCheck] = []
        self.specs: list[str] = []
        self.data = directory / "data"
        self.data.mkdir(mode=0o700)
        self.mounted = bool(options.disk_full) and self._mount()
        for name in options.consumers:
            self._configure(name)
        # The other engine, for consumers that take rows of any width.
        self.beside: subprocess.Popen[bytes] | None = None
        self.hub: subprocess.Popen[bytes] | None = None
        self.engine: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.killed: Counter[str] = Counter()
        self.returns: list[float] = []
        self.rests = 0

    def _configure(self, name: str) -> None:
        policy = f"policy={self.options.policy}"
        if self.options.policy == "spill":
            policy += f",spool_dir={self.directory}/spool-{name}"
        if name == "filesystem":
            root = self.data / "rows"
            self.checks.append(FilesystemCheck(root, self.oracle, keep=self.options.keep, forget=self.options.forget))
            self.specs.append(f"filesystem:root={root},on_collision=suffix,{policy}")
        else:
            weight = np.zeros((1, HIDDEN), np.float32)
            weight[0, 0] = 1
            probe = self.directory / "first.safetensors"
            Probe.make(SITES[DuckdbCheck.site], weight, names=("first",)).save(probe)
            self.checks.append(DuckdbCheck(self.data / "scores.duckdb", self.oracle))
            self.specs.append(f"duckdb:path={self.data}/scores.duckdb,probes={probe},{policy}")

    def _mount(self) -> bool:
        """Give the consumers' data a file system of its own; return whether that can be done."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={DATA_BYTES_MAX}", "none", str(self.data)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.options.tell("no file system can be mounted here: the consumers' disk is never full")
            return False
        self.data.chmod(0o700)
        return True

    @property
    def name(self) -> str:
        """The name of the running engine."""
        return f"e{self.lives}"

    def start_hub(self) -> None:
        command = [sys.executable, *self.command, "--address", self.address]
        for spec in self.specs:
            command += ["--consumer", spec]
        with (self.directory / "hub.err").open("ab") as log:
            self.hub = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_engine(self) -> None:
        self.lives += 1
        self.engine = self._engine(self.name, "spill", self.options.rate, HIDDEN, self.options.length_max)

    def start_beside(self) -> None:
        length_max = max(2, self.options.length_max // 8)  # else an inbox would hold all of a request's life
        self.beside = self._engine("beside", "spill-beside", self.options.rate / 8, BESIDE_HIDDEN, length_max)

    def _engine(self, name: str, spill: str, rate: float, hidden: int, length_max: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "engine.py"), self.address, str(self.directory / spill)]
        command += [str(self.directory / "engine.log"), name, str(rate), str(self.choose.getrandbits(32)), str(hidden)]
        command += [str(length_max)]
        with (self.directory / "engine.err").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, which: str) -> None:
        """Kill the hub, the engine side or both, and start them again."""
        parts = ["hub", "engine"] if which == "both" else [which]
        self.choose.shuffle(parts)
        for part in parts:
            process = self.hub if part == "hub" else self.engine
            assert process is not None
            if process.poll() is not None:
                self.oracle.off("failed", f"the {part} ended by itself with code {process.returncode}")
            process.kill()
            process.wait()
        self.killed[which] += 1
        self.watch_for(self.choose.uniform(*self.options.down_s))
        self.log.read()
        self.log.forget_fresh()
        self.choose.shuffle(parts)
        for part in parts:
            self.start_hub() if part == "hub" else self.start_engine()
        self.await_return(f"kill {sum(self.killed.values())}, of {which}", self.name if which != "hub" else None)

    def await_return(self, after: str, engine: str | None = None) -> None:
        """Wait until a frame that is sent from now on, by an engine or by any, is acknowledged."""
        since = time.monotonic()
        limit = since + 12 * self.options.return_s_max
        while (at := self.log.acked_at(since, engine)) is None and time.monotonic() < limit:
            self.turn()
        took = (at or limit) - since
        self.returns.append(took)
        self.options.tell(f"{after}: back after {took:.2f} s; {sum(self.log.frames.values())} frames sent")
        if took > self.options.return_s_max and self.killed:
            self.oracle.off("late", f"{after}: {took:.1f} s")

    def watch_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def turn(self) -> None:
        """Take in the log and what was published, and rest a moment."""
        self.log.read()
        for check in self.checks:
            check.sweep()
        # The pause between two looks.
        time.sleep(POLL_S)

    def run(self) -> None:
        """Kill as often as was asked for."""
        self.start_hub()
        self.start_engine()
        if "duckdb" not in self.options.consumers:  # whose probes have one width
            self.start_beside()
        self.await_return("start")
        order = [which for which, count in self.options.kills.items() for _ in range(count)]
        order += ["disk"] * (self.options.disk_full if self.mounted else 0)
        self.choose.shuffle(order)
        for which in order:
            self.watch_for(self.choose.uniform(*self.options.pause_s))
            self.await_room()
            self.fill_disk() if which == "disk" else self.kill(which)

    def fill_disk(self) -> None:
        """Have the consumers' disk full for some seconds."""
        seconds = self.choose.uniform(*self.options.full_s)
        fill = self.data / ".fill"
        block = bytes(limits.MIB)
        with fill.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(block):
                    pass
            until = time.monotonic() + seconds
            while time.monotonic() < until:  # what consumers remove is taken too
                with contextlib.suppress(OSError):
                    file.write(block)
                self.turn()
        fill.unlink()
        self.killed["disk"] += 1
        self.await_return(f"disk full for {seconds:.1f} s")

    def stop(self) -> None:
        """Let everything drain, end the processes well, and check all there is."""
        assert self.engine is not None
        assert self.hub is not None
        engines = {self.name: self.engine} | ({} if self.beside is None else {"beside": self.beside})
        for engine in engines.values():
            engine.terminate()
        for engine in engines.values():
            self.await_end("engine", engine, DRAIN_S_MAX)
        self.log.read()
        for name in engines.keys() - self.log.ended:
            self.oracle.off("failed", f"engine {name} did not get everything acknowledged")
        self.await_quiet()
        self.hub.send_signal(signal.SIGINT)
        self.await_end("hub", self.hub, DRAIN_S_MAX)
        self.log.read()
        for check in self.checks:
            check.finish()
        for name in ("hub", "engine"):
            self.read_errors(name)

    def inbox_bytes(self) -> int:
        """Return how much the largest inbox of a consumer holds; the lost requests in it are a failure."""
        with Client(self.address, 30) as client:
            spools = [one.get("spool") for one in client.status()["consumers"].values()]
        if any(spool and spool["requests_unkept"] for spool in spools):
            self.oracle.off("failed", f"requests were too long for an inbox: {spools}")
        return max(spool["bytes"] if spool else 0 for spool in spools)

    def await_room(self) -> None:
        """Wait until consumers catch up and dead engines are given up, before an inbox is full of unended requests."""
        if self.inbox_bytes() <= INBOX_BYTES_MAX:
            return
        self.rests += 1
        hold = self.directory / "engine.log.hold"
        hold.touch()
        deadline = time.monotonic() + DRAIN_S_MAX
        before, since = 0, time.monotonic()
        while (held := self.inbox_bytes()) > INBOX_BYTES_MAX // 2 and time.monotonic() < deadline:
            if held != before:
                before, since = held, time.monotonic()
            elif time.monotonic() - since > 2 * limits.MISSED_S:
                break  # what is left is of requests that run
            self.watch_for(0.5)
        if time.monotonic() >= deadline:
            self.oracle.off("failed", "the consumers do not catch up")
        hold.unlink()

    def await_quiet(self) -> None:
        """Wait until the hub has given up engines that are gone, and its consumers did nothing for a while."""
        deadline = time.monotonic() + DRAIN_S_MAX
        before: object = None
        while time.monotonic() < deadline:
            self.watch_for(QUIET_S)
            try:
                with Client(self.address, 10) as client:
                    status = client.status()
            except CapflowError as e:
                self.oracle.off("failed", f"the hub does not answer: {e}")
                return
            consumers = status["consumers"].values()
            now = [(one["frames"], one["results"], one["queued"]) for one in consumers]
            early = status["uptime_s"] < max(limits.MISSED_S, limits.SILENCE_S_MAX) + QUIET_S
            if now == before and not early and not status["requests"]["open"]:
                break
            before = now
        else:
            self.oracle.off("failed", f"the hub did not get done: {status['requests']}")
        if status["protocol_errors"] and not self.options.hostile:
            self.oracle.off("failed", f"{status['protocol_errors']} protocol errors")

    def await_end(self, name: str, process: subprocess.Popen[bytes], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            self.turn()
        if process.poll() is None:
            self.oracle.off("failed", f"the {name} does not end")
            process.kill()
        elif name == "engine" and process.returncode:
            self.oracle.off("failed", f"the {name} ended with code {process.returncode}")

    def read_errors(self, name: str) -> None:
        for line in (self.directory / f"{name}.err").read_text(errors="replace").splitlines():
            if "Traceback" in line or ("cut off" in line and not self.options.hostile):
                self.oracle.off("failed", f"{name}: {line}")

    def end(self) -> None:
        """Leave no process behind."""
        for process in (self.hub, self.engine, self.beside):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        if self.mounted and not self.options.keep:
            subprocess.run(["umount", "-l", str(self.data)], check=False)
            self.mounted = False

    def report(self, seconds: float) -> Iterable[tuple[str, object]]:
        """Yield the lines of the report: name and value."""
        log, counts = self.log, self.oracle.counts
        frames = sum(log.frames.values())
        acked = sum(log.acked.values()) + sum(len(spilled) for spilled in log.spilled.values())
        yield "run", f"seed {self.options.seed} at commit {revision()}"
        yield "kills", ", ".join(f"{count} of {which}" for which, count in sorted(self.killed.items()))
        yield (
            "frames sent",
            f"{frames} of 64 KiB in {seconds:.0f} s, {frames / seconds:.0f}/s; asked for {self.options.rate:g}/s",
        )
        yield "frames acknowledged", acked
        yield "frames replayed from spools of dead workers", sum(len(spilled) for spilled in log.spilled.values())
        yield "frames refused", dict(log.refused) or 0
        yield "requests", len(log.requests)
        yield "rests until inboxes were smaller", self.rests
        yield "slowest return after a restart", f"{max(self.returns[1:], default=0):.2f} s"
        for name in ("rows promised", "rows checked", "rows in named gaps", "requests of which nothing arrived", *OFF):
            yield name, counts[name]


def run(options: Options, directory: Path | None = None) -> tuple[dict[str, int], list[str]]:
    """Run it all; return what is off, by kind, and some of it in words."""
    where = Path(tempfile.mkdtemp(prefix="chaos-", dir=directory))
    chaos = Chaos(where, options)
    begun = time.monotonic()
    try:
        chaos.run()
        took = time.monotonic() - begun
        chaos.stop()
        for name, value in chaos.report(took):
            options.tell(f"| {name} | {value} |")
        off = {kind: chaos.oracle.counts[kind] for kind in OFF if chaos.oracle.counts[kind]}
        if not off and not options.keep:
            chaos.end()
            shutil.rmtree(where)
        else:
            options.tell(f"what was written lies in {where}")
        return off, chaos.oracle.troubles
    finally:
        chaos.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the hub and the engine side under load; check every row.")
    defaults = Options()
    for which, count in defaults.kills.items():
        parser.add_argument(f"--kills-{which}", type=int, default=count, help=f"(default: {count})")
    parser.add_argument(
        "--disk-full", type=int, default=defaults.disk_full, help=f"times (default: {defaults.disk_full})"
    )
    parser.add_argument("--rate", type=float, default=defaults.rate, help="frames a second (default: 2000)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--consumer", action="append", choices=["filesystem", "duckdb"], help="(default: filesystem)")
    parser.add_argument("--policy", default=defaults.policy, help="of the consumers (default: spill)")
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep what was written")
    arguments = parser.parse_args()
    options = Options(
        kills={which: getattr(arguments, f"kills_{which}") for which in defaults.kills},
        disk_full=arguments.disk_full,
        rate=arguments.rate,
        seed=arguments.seed,
        consumers=tuple(arguments.consumer or defaults.consumers),
        policy=arguments.policy,
        keep=arguments.keep,
        tell=lambda text: print(text, flush=True),
    )
    off, troubles = run(options, arguments.directory)
    for trouble in troubles:
        print(trouble)
    return 1 if off else 0
