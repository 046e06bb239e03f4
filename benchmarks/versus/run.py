"""A run: groups of contenders whose turns interleave with those of plain vLLM, and the options."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .check import Reference
from .contenders import CONTENDERS, PLAIN, Contender, chosen
from .drive import FailedError, MemoryPeak, Process, size_of
from .environments import NotMadeError, python_of
from .report import Outcome, documents, print_tables, write_docs

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED = Path("/dev/shm")  # noqa: S108, a directory below it has a name of its own
SHARED_BYTES_MIN = 2_000_000_000
"""With less room there, rows that are to stay in memory lie on the disk."""


class Run:
    """A run: the reference, the processes that live, and the outcome of each contender.

    work, memory: directories for files, the second on a memory file system.
    """

    def __init__(self, args: argparse.Namespace, work: Path, memory: Path) -> None:
        self.args, self.work, self.memory = args, work, memory
        self.outcomes: dict[str, Outcome] = {}
        self.alive: dict[str, Process] = {}
        self.idle_cpu_share = 0.0
        self._turns = 0
        self._job: dict[str, Any] = {}
        self._reference: Reference

    def prepare(self) -> None:
        """Make the model and the reference."""
        model = self.args.model
        if model == "demo":
            from capflow_engine.jobs.demo import prepare

            model = str(prepare())
        elif model == "llama":
            model = str(self.args.build / "llama")
            self._call("make_llama", model)
        directory = self.work / "reference"
        directory.mkdir()
        self._call("reference", model, str(directory), str(self.args.prompts), *self.args.lengths.split(","))
        self._job = json.loads((directory / "job.json").read_text()) | {"eager": self.args.eager}
        self._reference = Reference(directory, self._job["layer"])

    def _call(self, program: str, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).parent / "programs" / f"{program}.py"), *arguments]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise FailedError(f"--model {self.args.model}: {lines[-1] if lines else program}")

    def group(self, contenders: Sequence[Contender]) -> None:
        """Run some contenders beside plain vLLM, which may be the first of them."""
        for contender in contenders:
            self._start(contender)
        for number in range(1, self.args.rounds + 1):
            if PLAIN.name not in self.alive:
                raise FailedError(f"plain vLLM: {self.outcomes[PLAIN.name].reason}")
            names = [c.name for c in contenders if c.name in self.alive and c != PLAIN]
            turns = {}
            # As many turns of others lie between two of each; those of a pair change places after half of the rounds,
            # so that none always follows the same one. Plain's turn is measured again for each group.
            for name in [PLAIN.name, *(names if 2 * number <= self.args.rounds else reversed(names))]:
                if (turn := self._turn(CONTENDERS[name])) is not None:
                    turns[name] = turn
            for name, turn in turns.items() if PLAIN.name in turns else ():
                self.outcomes[name].turns.append((turn, turns[PLAIN.name]))
        for contender in contenders:
            if contender != PLAIN:
                self._end(contender.name)

    def close(self) -> None:
        """End every process."""
        for name in list(self.alive):
            self._end(name)

    def _start(self, contender: Contender) -> None:
        outcome = self.outcomes[contender.name] = Outcome(contender)
        disk, memory = self.work / contender.name, self.memory / contender.name
        disk.mkdir()
        memory.mkdir()
        job = self._job | {"mode": contender.mode, "disk": str(disk), "memory": str(memory)}
        try:
            python = python_of(contender.environment, self.args.build)
            log = self.args.build / "logs" / f"{contender.name}.log"
            self.alive[contender.name] = Process(python, contender.program, job, log, self.args.limit)
            with MemoryPeak(self.alive[contender.name], memory) as peak:
                self._turn(contender)
            outcome.peak_bytes = peak.peak_bytes
        except (FailedError, NotMadeError) as e:
            self._fail(contender.name, str(e))

    def _turn(self, contender: Contender) -> Any:
        """Run a turn and check it; return its cost, or None if the contender is out."""
        name, outcome = contender.name, self.outcomes[contender.name]
        disk, rows = self.work / name, self.work / "rows.npy"
        process, others = self.alive[name], [other for key, other in self.alive.items() if key != name]
        try:
            # A turn that follows those of others takes up to a third longer than one that follows one of its own. So
            # each has one that does not count, just before.
            process.turn(self._next())
            self._forget(name)
            before, idle = size_of(disk), sum(other.cpu_seconds() for other in others)
            tokens, turn = process.turn(self._next())
            idle = sum(other.cpu_seconds() for other in others) - idle
            self.idle_cpu_share = max(self.idle_cpu_share, idle / turn.seconds)
            outcome.disk_bytes = max(outcome.disk_bytes, size_of(disk) - before)
            import numpy as np

            process.save(rows)
            values = np.load(rows)
            outcome.row_bytes = values.nbytes
            wrong = self._reference.wrong(contender.task, tokens, values)
        except FailedError as e:
            self._fail(name, str(e))
            return None
        print(f"{name}: {turn.seconds:.1f} s, {turn.cpu_seconds:.1f} s of CPU", file=sys.stderr, flush=True)
        outcome.answers_wrong, outcome.rows_wrong, outcome.rows = (
            max(outcome.answers_wrong, wrong[0]), max(outcome.rows_wrong, wrong[1]), wrong[2]
        )  # fmt: skip
        if reason := outcome.refusal(self.args.prompts):
            self._fail(name, reason)
            return None
        self._forget(name)
        return turn

    def _next(self) -> int:
        """Return the number of a turn."""
        self._turns += 1
        return self._turns

    def _forget(self, name: str) -> None:
        """Remove the rows of a contender's turn."""
        for directory in (self.work / name, self.memory / name):
            empty(directory)

    def _fail(self, name: str, reason: str) -> None:
        print(f"{name}: {reason}", file=sys.stderr, flush=True)
        self.outcomes[name].reason = reason
        self._end(name)

    def _end(self, name: str) -> None:
        process = self.alive.pop(name, None)
        if process is not None:
            process.close()
        for directory in (self.work / name, self.memory / name):
            shutil.rmtree(directory, ignore_errors=True)


def empty(directory: Path) -> None:
    """Remove the rows of a turn: what lies in directories below `rows`, and files beside it but those of a database."""
    for path in (*directory.glob("rows/[!.]*"), *directory.glob("*.safetensors*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "probe.safetensors":
            path.unlink(missing_ok=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; end with one line for a wrong one."""
    parser = argparse.ArgumentParser(prog="versus.py", description="capflow against its peers")
    parser.add_argument("--only", default="", help=f"some of {', '.join(CONTENDERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each, beside one of plain vLLM (default: 6)")
    parser.add_argument("--model", default="demo", help="demo, llama (random weights) or a directory")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--lengths", default="128,32", help="tokens of a prompt and of an answer")
    parser.add_argument("--alive", type=int, default=2, help="contenders that live at the same time, beside plain vLLM")
    parser.add_argument("--limit", type=float, default=240, help="seconds to load, and for a turn")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "versus", help="environments and logs")
    parser.add_argument("--json", type=Path, help="write every turn to a file")
    parser.add_argument("--write", action="store_true", help="put tables and plot into docs/ and README.md")
    args = parser.parse_args(arguments)
    try:
        args.contenders = chosen(args.only)
    except ValueError as e:
        parser.exit(2, f"versus: {e}\n")
    lengths = args.lengths.split(",")
    if len(lengths) != 2 or not all(length.isdigit() and int(length) > 1 for length in lengths):
        parser.exit(2, f"versus: --lengths: got {args.lengths}, expected two numbers above 1, as 128,32\n")
    for name in ("rounds", "prompts", "alive", "limit"):
        if getattr(args, name) < 1:
            parser.exit(2, f"versus: --{name}: got {getattr(args, name)}, expected 1 or more\n")
    if args.model not in {"demo", "llama"} and not (Path(args.model) / "config.json").is_file():
        parser.exit(2, f"versus: --model: got {args.model}, expected demo, llama or a directory with config.json\n")
    if args.write and args.model not in {"demo", "llama"}:
        parser.exit(2, f"versus: --write: got --model {args.model}, expected demo or llama\n")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, and print or write its tables."""
    args = parsed(arguments)
    if args.write:
        # A missing marker is better seen now than in half an hour.
        documents(args, ROOT)
    (args.build / "logs").mkdir(parents=True, exist_ok=True)
    whole = True
    shared = SHARED if SHARED.is_dir() and shutil.disk_usage(SHARED).free > SHARED_BYTES_MIN else None
    with (
        tempfile.TemporaryDirectory(prefix="work-", dir=args.build) as work,
        tempfile.TemporaryDirectory(prefix="capflow-versus-", dir=shared) as memory,
    ):
        run = Run(args, Path(work), Path(memory))
        try:
            run.prepare()
            contenders = args.contenders
            run.group([PLAIN, *contenders[1 : args.alive + 1]])
            for first in range(args.alive + 1, len(contenders), args.alive):
                run.group(contenders[first : first + args.alive])
        except FailedError as e:
            print(f"versus: {e}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            whole = False
        finally:
            run.close()
    outcomes = [run.outcomes[contender.name] for contender in args.contenders if contender.name in run.outcomes]
    print_tables(outcomes, args, idle_cpu_share=run.idle_cpu_share)
    if args.json is not None:
        args.json.write_text(json.dumps([outcome.as_json() for outcome in outcomes], indent=1))
    if args.write and whole:
        write_docs(outcomes, args, idle_cpu_share=run.idle_cpu_share, root=ROOT)
    return 0 if whole else 130
