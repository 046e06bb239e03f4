"""The cost of planning a step for the step thread.

    PYTHONPATH=.:engine_ext python3 benchmarks/plan.py

Each line is a batch that decodes, unless its name says otherwise. It has the median times of `Planner.plan`, of binding
the plan to a step on the CPU (`Step`), and of writing the GPU's tables (`Tables.load`, into host memory, without the
copy to a device). The ratio is that of `plan` against a bare loop over the batch that unpacks each entry and does
nothing. A program is one request's choice of sites and positions; `sites` is how many of the 36 it names.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from capflow.capture.positions import Positions
from capflow_engine.steering.budget import Size
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Batch, Plan, Planner, Scheduled
from capflow_engine.taps.requests import Program, Tracked
from capflow_engine.taps.step import Step
from capflow_engine.taps.tables import Tables

SITES, TOKENS, PROMPT = 36, 8192, 64


class Case:
    """A batch that is planned many times.

    captured: how many of the requests ask for something; all by default.
    """

    def __init__(
        self,
        about: str,
        requests: int,
        programs: int,
        sites: int,
        *,
        captured: int | None = None,
        forms: Sequence[object] = ("all",),
    ) -> None:
        rng = np.random.default_rng(7)
        self.planner = Planner(SITES)
        self.about, self.count, self.programs, self.sites = about, requests, programs, sites
        made = []
        for number in range(programs):
            positions = Positions.parse(forms[number % len(forms)])
            made.append(
                self.planner.program({int(site): positions for site in rng.choice(SITES, sites, replace=False)})
            )
        asking = requests if captured is None else captured
        self.captured = asking
        chosen = [made[n % programs] if n < asking else self.planner.nothing for n in range(requests)]
        self.tracked = [self._tracked(number, program) for number, program in enumerate(chosen)]

    def _tracked(self, number: int, program: Program) -> Tracked:
        return Tracked(f"r{number}", f"r{number}", PROMPT, program, self.planner.nothing, computed=PROMPT)

    def batches(self, steps: int) -> Iterator[Batch]:
        """Yield the batch of each step."""
        requests, lengths = tuple(self.tracked), np.ones(self.count, np.int64)
        for step in range(steps):
            yield Batch(requests, lengths * (PROMPT + step), lengths)


class Changing(Case):
    """In each step a request takes the place of another one: nothing is as in the step before."""

    def batches(self, steps: int) -> Iterator[Batch]:
        """Yield the batch of each step."""
        for step, batch in enumerate(super().batches(steps)):
            requests, place = list(batch.requests), step % self.count
            former = requests[place]
            self.planner.drop(former)
            requests[place] = self.tracked[place] = self._tracked(place, former.ship)
            requests[place].computed = PROMPT + step
            yield Batch(tuple(requests), batch.starts, batch.lengths)


class Prefill(Case):
    """One request's prompt of `TOKENS` tokens in one step."""

    def batches(self, steps: int) -> Iterator[Batch]:
        """Yield the batch of each step."""
        for _ in range(steps):
            request = self.tracked[0]
            yield Batch.of([Scheduled(Tracked("r", "r", TOKENS, request.ship, self.planner.nothing), 0, 0, TOKENS)])


EIGHT = ["all", "all_generated", {"every": 1}, *({"generated": [n, None]} for n in range(5))]

CASES = [
    Case("nothing captured", 256, 1, 36, captured=0),
    Case("1 of 64 captured", 64, 1, 36, captured=1),
    Case("8 of 64 captured", 64, 1, 36, captured=8),
    Case("64 of 64 captured", 64, 1, 36, captured=64),
    Case("everything", 256, 1, 36),
    Changing("everything, changing", 256, 1, 36),
    Case("8 sets of positions", 256, 8, 36, forms=EIGHT),
    Case("8 sets of sites", 256, 8, 8),
    Case("8 large sets of sites", 256, 8, 28),
    Case("a set of sites for each", 256, 256, 8),
    Case("every 4th position", 256, 1, 36, forms=[{"every": 4}]),
    Prefill("a prompt of 8192", 1, 1, 36),
    Prefill("a prompt of 8192, every 8th", 1, 1, 36, forms=[{"every": 8}]),
]


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1000


def measure(case: Case, steps: int) -> tuple[Plan, dict[str, float]]:
    """Return the last plan that has rows, and the median times."""
    bank = Bank(Size(1, 1, 1), {}, 1, torch.device("cpu"))
    tables = Tables(
        sites=SITES,
        tokens=TOKENS,
        rows=1,
        hidden=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        resident=True,
    )
    times: dict[str, list[float]] = {"plan": [], "loop": [], "step": [], "tables": []}
    shown = None
    for batch in case.batches(steps):
        made: list[Plan] = []
        times["plan"].append(microseconds(lambda batch=batch, made=made: made.append(case.planner.plan(batch))))
        times["loop"].append(microseconds(lambda parts=batch.made: bare(parts)))
        buffer = torch.empty(made[0].rows, 1)
        times["step"].append(microseconds(lambda made=made, buffer=buffer: Step(made[0], buffer, bank)))
        tokens = made[0].tokens
        times["tables"].append(microseconds(lambda made=made, tokens=tokens: tables.load(made[0], tokens)))
        shown = made[0] if made[0].rows or shown is None else shown
    assert shown is not None
    return shown, {name: statistics.median(values) for name, values in times.items()}


def bare(parts: Sequence[Scheduled]) -> None:
    for _number, (_request, _row, _start, _length) in enumerate(parts):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="What planning a step costs the step thread.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each case (default: 300)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| batch | requests | programs | sites | rows | blocks | plan µs | ratio | step µs | tables µs |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        plan, took = measure(case, arguments.steps)
        ratio = took["plan"] / took["loop"]
        print(
            f"| {case.about} | {case.count} | {case.programs} | {case.sites} | {plan.rows} | {len(plan.blocks)} "
            f"| {took['plan']:.0f} | {ratio:.1f} | {took['step']:.0f} | {took['tables']:.0f} |"
        )


if __name__ == "__main__":
    main()
