"""What latched gates carry, against the largest margin of all earlier positions, for batches that change at random."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capflow_engine.taps.gates import Gating
from capflow_engine.taps.plan import Scheduled
from capflow_engine.worker.gates.latches import Latches

STEPS = 300


class Requests:
    """Running requests, and by key the margins `[gates]` of each position computed so far."""

    def __init__(self, rng):
        self._rng = rng
        self.count = 0
        self.running = []
        self.margins = {}

    def change(self):
        """Change what runs and where, or nothing: then each request computes one token more."""
        kind = self._rng.choice(["none"] * 6 + ["join", "end", "swap", "preempt", "reject"])
        at = int(self._rng.integers(len(self.running))) if self.running else 0
        if kind == "join" or not self.running:
            self.count += 1
            gates = int(self._rng.integers(1, 4))
            self.running.append(SimpleNamespace(key=f"r{self.count}", gates=gates, latched=self._rng.random() < 0.8))
            self.margins[f"r{self.count}"] = []
        elif kind == "end":
            self.margins.pop(self.running.pop(at).key)
        elif kind == "swap":
            self.running.append(self.running.pop(at))
        elif kind in ("preempt", "reject"):
            done = self.margins[self.running[at].key]
            del done[0 if kind == "preempt" else max(0, len(done) - 2) :]
        return kind

    def scheduled(self):
        """Return the next step: several tokens for a request that has none, or once in a while."""
        batch, row = [], 0
        for request in self.running:
            done = len(self.margins[request.key])
            several = not done or self._rng.random() < 0.05
            length = int(self._rng.integers(1, 5)) if several else 1
            batch.append(Scheduled(request, row, done, length))
            row += length
        return batch, row


@pytest.mark.parametrize("seed", range(4))
def test_what_is_carried_is_the_largest_margin_before(seed):
    rng = np.random.default_rng(seed)
    requests, latches, changes, chunks = Requests(rng), Latches(torch.device("cpu")), Counter(), 0
    keys = set()
    for _ in range(STEPS):
        changes[requests.change()] += 1
        for gone in keys - requests.margins.keys():
            latches.forget(gone)
        keys = set(requests.margins)
        batch, tokens = requests.scheduled()
        latched = [number for number, each in enumerate(batch) if each.request.latched]
        gates = max((each.request.gates for each in batch), default=0)
        plan = SimpleNamespace(batch=batch, latched=latched, gates=gates)
        carried = latches.begin(plan)
        assert (carried is None) == (not latched)
        for column, number in enumerate(latched):
            request = batch[number].request
            expected = np.max([np.full(3, -math.inf), *requests.margins[request.key]], axis=0)
            np.testing.assert_array_equal(carried[: request.gates, column], expected[: request.gates])
        gating = Gating(plan, tokens, carried, None)
        margins = torch.from_numpy(
            np.where(rng.random((gates, tokens)) < 0.2, -math.inf, rng.normal(size=(gates, tokens)))
        )
        gating.margins.copy_(margins)
        for number in latched:
            request, row, _, length = batch[number]
            chunks += length > 1
            for gate in range(request.gates):
                before = np.max([each[gate] for each in requests.margins[request.key]], initial=-math.inf)
                mine = np.maximum(np.maximum.accumulate(gating.margins[gate, row : row + length].numpy()), before)
                value = gating.value(2 * gate + 1, math.inf)[row : row + length]
                np.testing.assert_array_equal(value, mine >= 0)
        latches.end(plan, carried, gating.margins)
        for request, row, _, length in batch:
            for token in range(row, row + length):
                own = np.full(3, -math.inf, np.float32)
                own[:gates] = gating.margins[:, token]
                requests.margins[request.key].append(own)
    assert min(changes[kind] for kind in ("none", "join", "end", "swap", "preempt", "reject")) > 5, changes
    assert chunks > 20
