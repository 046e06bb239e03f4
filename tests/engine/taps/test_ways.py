"""The ways of a step before are used again only where they are those of this step; the results are the same."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from capflow.capture.site import Site
from capflow.steering.program import ADD, SCORE_DOT, Op, ProgramGate, SiteOps, SteeringProgram, digest
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.gates import Gating
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.step import Step
from capflow_engine.worker.gates.latches import Latches
from tests.kit.gate_cases import gated_program
from tests.kit.tap_cases import random_program

SITES, WIDTH, PROMPT, STEPS = 3, 16, 2, 200
CPU, HOOK = torch.device("cpu"), "post_block"


def chains(rng, sites, width):
    """Return a program of gates and operations of every kind."""
    return gated_program(rng, sites, width, rng.normal(size=(20, width)))


def additions(rng, sites, width):
    """Return a program of one gate that gates an addition at each later site."""
    rows = rng.normal(size=(sites, width)).astype(np.float32)
    gate = ProgramGate("g", float(rng.choice([2.0, math.inf])), bool(rng.random() < 0.5), 0.0, 0, HOOK)
    ops = [Op(SCORE_DOT, 0, 0.0, gate=0), *(Op(ADD, site, gate=0) for site in range(1, sites))]
    each = tuple(SiteOps(site, HOOK, (op,)) for site, op in enumerate(ops))
    return SteeringProgram(width, rows.tobytes(), tuple(digest(row.tobytes()) for row in rows), each, each, (), (gate,))


class Batch:
    """Requests that come, go and take the slots of each other."""

    def __init__(self, rng):
        self._rng = rng
        self.bank = Bank(Size(512, 8192, 64), {Site(n, HOOK): n for n in range(SITES)}, WIDTH, CPU)
        self.planner, self.latches = Planner(SITES), Latches(CPU)
        # Each with the number of its computed tokens, and what it took of the bank.
        self._running = []

    def change(self):
        """Change the batch, or nothing."""
        kind = self._rng.choice(["none"] * 4 + ["join", "end", "exchange"])
        place = int(self._rng.integers(len(self._running))) if self._running else 0
        if kind in ("end", "exchange") and self._running:
            request, _, taken = self._running.pop(place)
            self.bank.release(taken)
            self.latches.forget(request.key)
        if (kind in ("join", "exchange") or not self._running) and len(self._running) < 10:
            self._join(place)
        return kind

    def _join(self, place):
        name, rng = f"r{self._rng.integers(1 << 40)}", self._rng
        program = rng.choice([additions, random_program, chains])(rng, SITES, WIDTH)
        taken = self.bank.acquire(program, PROMPT)
        request = Tracked(name, name, PROMPT, self.planner.nothing, self.planner.nothing)
        request.steered = [SlotRange(0, PROMPT, taken)]
        request.gates, request.latched = program.gates, any(gate.latched for gate in program.gates)
        self._running.insert(place, [request, 0, taken])

    def plan(self):
        """Return the plan of the next step and the number of its tokens."""
        batch = []
        for running in self._running:
            request, done, _ = running
            batch.append(Scheduled(request, len(batch), done, 1))
            running[1] += 1
        return self.planner.plan(batch), len(batch)


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_use_ways_again_do_what_new_ways_do(seed):
    rng = np.random.default_rng(seed)
    batch, ways, counts = Batch(rng), None, Counter()
    for _ in range(STEPS):
        counts[batch.change()] += 1
        plan, tokens = batch.plan()
        carried = batch.latches.begin(plan)
        hidden = torch.from_numpy(rng.normal(size=(tokens, WIDTH))).float()
        residual = torch.from_numpy(rng.normal(size=(tokens, WIDTH))).float()
        results = []
        for before in (None, ways):
            gating = Gating(plan, tokens, carried, None) if plan.gates else None
            step = Step(plan, None, batch.bank, gating, before)
            streams = [hidden.clone() for _ in range(SITES)]
            for site, stream in enumerate(streams):
                step.tap(site, stream, residual)
            results.append([*streams, *([] if gating is None else [gating.margins])])
        counts["again"] += step.ways is not None and step.ways is ways
        ways = step.ways or ways
        for new, again in zip(*results, strict=True):
            assert torch.equal(new, again)
        counts["steered"] += not torch.equal(results[0][0], hidden)
        if gating is not None:
            batch.latches.end(plan, carried, gating.margins)
    assert min(counts[name] for name in ("again", "steered", "exchange", "end")) > STEPS // 10, counts
