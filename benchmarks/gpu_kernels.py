"""The tap's kernel on a GPU. Prints Markdown tables.

The kernel is compared with float64, also inside CUDA graphs whose plans change; then it is timed.

    PYTHONPATH=.:engine_ext:tests python3 benchmarks/gpu_kernels.py [--out FILE]

It needs torch, triton, numpy, msgspec, ml_dtypes, xxhash and pluggy, but not vLLM. It takes about a minute on one
GPU. Without a GPU, `--smoke` runs the same code in Triton's interpreter on small shapes, which shows that it works; the
times then mean nothing.

Predicted: an idle tap costs one launch in the graph, about 1.3 µs. A capturing one costs the time to read the stream
    twice and write it once. Goals: idle at most 1.5 µs a tap; the rows of 256 tokens at 36 layers within 1.2 times the
    cost of 36 launches and the bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from capflow.capture.positions import Positions  # noqa: E402
from capflow.capture.site import Site  # noqa: E402
from capflow.steering.program import (  # noqa: E402
    ADD,
    CLAMP,
    PATCH,
    SCORE_DOT,
    Op,
    ProgramGate,
    SiteOps,
    SteeringProgram,
    digest,
)
from capflow_engine.steering.budget import Size  # noqa: E402
from capflow_engine.taps.acting import SlotRange  # noqa: E402
from capflow_engine.taps.bank import Bank, Steered  # noqa: E402
from capflow_engine.taps.gpu.kernel import launch  # noqa: E402
from capflow_engine.taps.plan import Plan, Planner, Scheduled  # noqa: E402
from capflow_engine.taps.requests import Tracked  # noqa: E402
from capflow_engine.taps.tables import Tables  # noqa: E402
from tests.kit import gate_cases, tap_cases  # noqa: E402

DEVICE = torch.device("cpu" if SMOKE else "cuda")
LAYERS = 3 if SMOKE else 36
WIDTHS = (64,) if SMOKE else (1024, 2048, 4096, 8192)
TOKENS = (1, 4) if SMOKE else (1, 8, 64, 256, 512)
TOKENS_MAX = TOKENS[-1]
"""For which the tables are made, as an engine makes them for the largest step."""
REPLAYS = 1 if SMOKE else 60
ROUNDS = 1 if SMOKE else 5
CHECKED_REPLAYS = 6 if SMOKE else 60
CHECKED_SEEDS = 1 if SMOKE else 10
CONFIGURATIONS = 8
KINDS = ("no taps", "idle", "capture", "add", "clamp", "gate", "latch")
HOOK = "post_block"


# --- correct ---


def check_cases() -> int:
    """Compare the kernel with the float64 reference on odd shapes and poisoned buffers; return the number of cases."""
    done = 0
    for case in tap_cases.CASES:
        for seed in range(CHECKED_SEEDS):
            tap_cases.check(case, seed, tap_cases.start_kernel, truncate=SMOKE, device=DEVICE, features=seed % 2 == 1)
            done += 1
    return done


def check_gates() -> tuple[int, int]:
    """Compare gates with the float64 reference; return the number of cases, and how often a gate was open."""
    cases, counts = gate_cases.run_all_gate_cases(DEVICE, CHECKED_SEEDS)
    return cases, counts["open", False] + counts["open", True]


class Stack:
    """A stack of layers over a split stream, with a tap after each, as one graph; its tensors never move.

    A layer is elementwise, so its result does not depend on the batch, and a reference without taps is exact.
    """

    def __init__(self, width: int, tokens: int, dtype: torch.dtype, *, taps: bool) -> None:
        generator = torch.Generator().manual_seed(width + tokens)
        self.width, self.tokens = width, tokens
        self.entry = torch.randn(2, tokens, width, generator=generator).to(dtype).to(DEVICE)
        self.weight = (torch.rand(LAYERS, width, generator=generator) + 0.5).to(dtype).to(DEVICE)
        self.hidden = torch.empty(tokens, width, dtype=dtype, device=DEVICE)
        self.residual = torch.empty_like(self.hidden)
        self.tables = Tables(
            sites=LAYERS,
            tokens=max(tokens, TOKENS_MAX),
            rows=LAYERS * tokens,
            hidden=width,
            dtype=dtype,
            device=DEVICE,
            resident=True,
            requests=tokens,
        )
        index = {Site(n, HOOK): n for n in range(LAYERS)}
        self.bank = Bank(
            Size(8 * CONFIGURATIONS, 16 * LAYERS * CONFIGURATIONS, 8 * CONFIGURATIONS), index, width, DEVICE
        )
        rows = torch.randn(CONFIGURATIONS, width, generator=generator)
        self.steered = {kind: self._configurations(rows, kind) for kind in (ADD, CLAMP, PATCH)}
        self.gates = {latched: ProgramGate("g", math.inf, latched, 0.0, 0, HOOK) for latched in (False, True)}
        self.gated = {latched: self._gated(rows, latched) for latched in (False, True)}
        self.sites = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in range(LAYERS)]
        self.taps = taps
        self.replay = graph_of(self.forward)

    def _configurations(self, rows: torch.Tensor, kind: int) -> list[Steered]:
        """Return slots that do one operation at every layer, each with one of the rows."""
        slots = []
        for row in rows.numpy():
            ops = tuple(SiteOps(n, HOOK, (Op(kind, 0, 1.0, -1.0, 1.0),)) for n in range(LAYERS))
            content = row.tobytes()
            slots.append(self.bank.acquire(SteeringProgram(self.width, content, (digest(content),), ops, ops), 1))
        return slots

    def _gated(self, rows: torch.Tensor, latched: bool) -> list[Steered]:
        """Return slots that score at the first layer, and add one of the rows where the gate is open at all others."""
        slots = []
        for row in rows.numpy():
            content = np.ascontiguousarray(np.stack([row, row[::-1]]))
            adds = tuple(SiteOps(n, HOOK, (Op(ADD, 0, gate=0),)) for n in range(1, LAYERS))
            ops = (SiteOps(0, HOOK, (Op(SCORE_DOT, 1, 0.0, gate=0),)), *adds)
            names = tuple(digest(each.tobytes()) for each in content)
            program = SteeringProgram(self.width, content.tobytes(), names, ops, ops, (), (self.gates[latched],))
            slots.append(self.bank.acquire(program, 1))
        return slots

    def forward(self) -> None:
        """Run the layers; the stream after the last is in `hidden` and `residual`."""
        self.hidden.copy_(self.entry[0])
        self.residual.copy_(self.entry[1])
        tensors = [*self.tables.device_tensors().values(), *self.bank.device_tensors().values()]
        for number in range(LAYERS):
            self.layer(number, self.hidden, self.residual)
            if self.taps:
                launch(self.hidden, self.residual, self.sites[number], *tensors)

    def layer(self, number: int, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Run one layer in place: the halves of the stream are added and split again."""
        residual.add_(hidden)
        torch.mul(residual, self.weight[number], out=hidden)
        hidden.tanh_()

    def expected(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the staging rows and the stream of a plan, computed without the kernel and without a graph."""
        hidden, residual = self.entry[0].clone(), self.entry[1].clone()
        rows = torch.full((plan.rows, self.width), tap_cases.POISON, dtype=hidden.dtype, device=DEVICE)
        margins = torch.full((self.tokens,), -math.inf, dtype=torch.float64, device=DEVICE)
        for number in range(LAYERS):
            self.layer(number, hidden, residual)
            stream = rounded(hidden.float() + residual.float(), hidden.dtype)
            for block in plan.blocks:
                if number in block.sites:
                    base = block.base + block.sites.index(number) * block.rows
                    for run in block.runs:
                        rows[base + run.target : base + run.target + run.length] = stream[
                            run.source : run.source + run.length
                        ]
            for source, length, slot in plan.steered:
                op = int(self.bank.heads[slot, number])
                if op < 0:
                    continue
                half, other = (part[source : source + length].float() for part in (hidden, residual))
                kind, row, _, code = self.bank.op_ints[op].tolist()
                if kind == SCORE_DOT:
                    margins[source : source + length] = (half + other).double() @ self.bank.rows[row].double()
                    continue
                change = self.bank.rows[row] if kind == ADD else self.bank.rows[row] - (half + other)
                if code >= 0:
                    change = change * _opened(plan, margins, source, length, latched=code % 2 == 1)
                hidden[source : source + length] = rounded(half + change, hidden.dtype)
        return rows, hidden


def carried_by(plan: Plan) -> torch.Tensor | None:
    """Return what the latched gates of a plan carry: nothing is open yet; None if there are none."""
    return torch.full((plan.gates, len(plan.latched)), -math.inf, device=DEVICE) if plan.latched else None


def check_graphs() -> int:
    """Replay one graph while plans change between replays; return how many replays were right.

    Requests come and go, steered or not, captured or not, in a random order. Every buffer is poisoned before.
    """
    checked = 0
    for width, tokens in ((WIDTHS[0], 7), (WIDTHS[0] + 5, 33)):
        stack = Stack(width, tokens, torch.bfloat16, taps=True)
        rng = np.random.default_rng(width)
        for number in range(CHECKED_REPLAYS):
            plan = _random_plan(rng, tokens, stack) if number % 5 else plan_of("idle", tokens, stack)
            stack.tables.margins.fill_(-tap_cases.POISON)
            stack.tables.load(plan, tokens, carried_by(plan))
            stack.tables.staging.fill_(tap_cases.POISON)
            stack.replay()
            rows, hidden = stack.expected(plan)
            assert torch.equal(stack.tables.staging[: plan.rows], rows), f"replay {number}: rows"
            assert (stack.tables.staging[plan.rows :] == tap_cases.POISON).all(), (
                f"replay {number}: rows nobody asked for"
            )
            assert torch.equal(stack.hidden, hidden), f"replay {number}: the stream"
            checked += 1
    return checked


def _opened(plan: Plan, margins: torch.Tensor, source: int, length: int, *, latched: bool) -> torch.Tensor:
    """Return 1 for each of some token rows of one request at which its hard gate is open, `[length, 1]`, else 0."""
    part = next(part for part in plan.batch if part.row <= source < part.row + part.length)
    if latched:
        margins = margins.clone()
        margins[part.row : part.row + part.length] = margins[part.row : part.row + part.length].cummax(0).values
    return (margins[source : source + length] >= 0).float().unsqueeze(1)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values in a dtype, rounded as the kernel rounds them."""
    return tap_cases.rounded(values, dtype, SMOKE)


def _random_plan(rng: np.random.Generator, tokens: int, stack: Stack) -> Plan:
    planner = Planner(LAYERS)
    batch: list[Scheduled] = []
    row = 0
    sets = [Positions.ALL, Positions.LAST_PROMPT, Positions.ALL_GENERATED, Positions.parse({"every": 2})]
    while row < tokens:
        length = int(rng.integers(1, 6))
        length = min(length, tokens - row)
        wanted = {s: sets[int(rng.integers(len(sets)))] for s in range(LAYERS) if rng.random() < 0.4}
        start = int(rng.integers(0, 4))
        prompt = int(rng.integers(1, start + length + 1))
        request = Tracked(str(row), str(row), prompt, planner.program(wanted), planner.nothing)
        if rng.random() < 0.4:
            # No clamps, whose result is rounded on its way: see `check_cases`.
            every = [stack.steered[ADD], stack.steered[PATCH]]
            prefill, decode = (every[rng.integers(2)][rng.integers(CONFIGURATIONS)] for _ in range(2))
            request.steered = [SlotRange(0, request.prompt_length, Steered(prefill.prefill, decode.decode, {}))]
        elif rng.random() < 0.6:
            latched = bool(rng.integers(2))
            request.steered = [SlotRange(0, request.prompt_length, stack.gated[latched][rng.integers(CONFIGURATIONS)])]
            request.gates, request.latched = (stack.gates[latched],), latched
        batch.append(Scheduled(request, row, start, length))
        row += length + int(rng.random() < 0.2)  # a request without captures lies between
    return planner.plan(batch)


# --- fast ---


def plan_of(kind: str, tokens: int, stack: Stack) -> Plan:
    """Return the plan of a decode step of `tokens` requests.

    kind: `idle`, `capture` (everything), `add` or `clamp` (all requests steered at every layer), `gate` or `latch` (all
        requests scored at the first layer, and steered at all others where the gate is open).
    """
    planner = Planner(LAYERS)
    wanted = dict.fromkeys(range(LAYERS), Positions.ALL) if kind == "capture" else {}
    batch = []
    for number in range(tokens):
        request = Tracked(str(number), str(number), 1, planner.program(wanted), planner.nothing)
        if kind in ("add", "clamp"):
            steered = stack.steered[ADD if kind == "add" else CLAMP][number % CONFIGURATIONS]
            request.steered = [SlotRange(0, 1, steered)]
        if kind in ("gate", "latch"):
            latched = kind == "latch"
            request.steered = [SlotRange(0, 1, stack.gated[latched][number % CONFIGURATIONS])]
            request.gates, request.latched = (stack.gates[latched],), latched
        batch.append(Scheduled(request, number, 5, 1))
    return planner.plan(batch)


class Cost(NamedTuple):
    """The cost of one replay of the whole stack, microseconds.

    step: by kind.
    floor: of a bare copy of the same rows and as many launches.
    """

    width: int
    tokens: int
    step: dict[str, float]
    floor: float


def measure(width: int, tokens: int, bytes_per_us: float) -> Cost:
    """Return the cost of a step without taps, with idle ones, capturing, adding and clamping; the turns interleave."""
    plain, tapped = (Stack(width, tokens, torch.bfloat16, taps=taps) for taps in (False, True))
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for kind in KINDS:
            if kind == "no taps":
                times.setdefault(kind, []).append(time_of(plain.replay))
                continue
            plan = plan_of(kind, tokens, tapped)
            tapped.tables.load(plan, tokens, carried_by(plan))
            times.setdefault(kind, []).append(time_of(tapped.replay))
    step = {kind: statistics.median(values) for kind, values in times.items()}
    moved = 3 * LAYERS * tokens * width * 2  # both halves are read, the row is written
    return Cost(width, tokens, step, step["idle"] - step["no taps"] + moved / bytes_per_us)


def device_bandwidth() -> float:
    """Return the bytes a microsecond that a large copy on the device reads and writes, both counted."""
    size = 2**16 if SMOKE else 2**29
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    replay = graph_of(lambda: target.copy_(source))
    return 2 * size / statistics.median(time_of(replay) for _ in range(ROUNDS))


def staging_copy() -> list[tuple[int, float, float]]:
    """Time the copy of steps of several sizes to the host.

    Return of each its bytes, the microseconds of the copy, and the microseconds at the link's bandwidth.
    """
    pinned = not SMOKE
    big = 2**16 if SMOKE else 2**28
    device, host = (
        torch.empty(big, dtype=torch.uint8, device=DEVICE),
        torch.empty(big, dtype=torch.uint8, pin_memory=pinned),
    )
    link = big / statistics.median(time_of(lambda: host.copy_(device, non_blocking=True)) for _ in range(ROUNDS))
    copies = []
    for rows in (LAYERS, LAYERS * 8, LAYERS * 64, LAYERS * 256):
        size = min(rows * WIDTHS[-1] * 2, big)
        copy = statistics.median(
            time_of(lambda n=size: host[:n].copy_(device[:n], non_blocking=True)) for _ in range(ROUNDS)
        )
        copies.append((size, copy, size / link))
    return copies


def graph_of(body: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays `body`: as a CUDA graph, or `body` itself where there is no GPU."""
    body()
    if SMOKE:
        return body
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def time_of(call: Callable[[], object], replays: int = REPLAYS) -> float:
    """Return the microseconds of a call on the device, as the mean of many in a row."""
    if SMOKE:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e6
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / replays


def report(costs: Iterable[Cost]) -> Iterator[str]:
    """Yield the table of what a step costs."""
    yield from (
        f"A stack of {LAYERS} layers, bfloat16; microseconds a step, and of one tap:",
        "",
        "| width | tokens | no taps | idle | capture | add | clamp | gate | latch | a tap | all rows | 1.2 x floor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    )
    for width, tokens, step, floor in costs:
        plain = step["no taps"]
        idle, capture = step["idle"] - plain, step["capture"] - plain
        yield (
            f"| {width} | {tokens} | {plain:.1f} | {step['idle']:.1f} | {step['capture']:.1f} "
            f"| {step['add']:.1f} | {step['clamp']:.1f} | {step['gate']:.1f} | {step['latch']:.1f} "
            f"| {idle / LAYERS:.2f} | {capture:.1f} | {1.2 * floor:.1f} |"
        )


def tables() -> Iterator[str]:
    """Check and measure; yield the lines of the report, each as soon as it is known."""
    cases, replays, (gated, opened) = check_cases(), check_graphs(), check_gates()
    checked = f"{cases} cases equal to float64, {replays} replays with changing plans right"
    checked += f"; {gated} cases with gates, {opened} times open"
    bandwidth = device_bandwidth()
    yield from (f"{device_name()}: {checked}.", "", f"Memory moves {bandwidth / 1e6:.2f} TB/s.", "")
    yield from report(measure(width, tokens, bandwidth) for width in WIDTHS for tokens in TOKENS)
    yield from ("", "| bytes of a step | copy to the host, µs | at the link's bandwidth, µs |", "|---|---|---|")
    yield from (f"| {size} | {copy:.1f} | {bound:.1f} |" for size, copy, bound in staging_copy())


def device_name() -> str:
    """Return what runs the kernels, and torch's version."""
    name = "Triton's interpreter" if SMOKE else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}"


def show(report: Iterable[str], out: Path | None) -> None:
    """Print the lines of a report, and write them to a file, each at once: what was measured stays."""
    lines = []
    for line in report:
        print(line, flush=True)
        lines.append(line)
        if out is not None:
            out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Check, measure, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small shapes, in Triton's interpreter, without a GPU")
    out = parser.parse_args().out
    if not SMOKE and not torch.cuda.is_available():
        sys.exit("gpu_kernels: no GPU here; --smoke runs in Triton's interpreter")
    show(tables(), out)


if __name__ == "__main__":
    main()
