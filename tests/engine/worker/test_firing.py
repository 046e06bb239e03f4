"""The gates of a step, as they were when it was launched."""

import math
from types import SimpleNamespace

import numpy as np

from capflow.steering.program import ProgramGate
from capflow_engine.taps.plan import Scheduled
from capflow_engine.worker.firing import GatedStep


def gate(sharpness):
    return ProgramGate("rude", sharpness, layer=1, hook="post_block")


def test_rows_are_marked_by_the_gates_that_they_had_though_an_action_changed_them_since():
    """A soft gate acts where a hard one is closed."""
    for before, after, marks in ((math.inf, 2.0, [False, True]), (2.0, math.inf, [True, True])):
        request = SimpleNamespace(key="key", steered=None, gates=(gate(before),))
        plan = SimpleNamespace(batch=[Scheduled(request, 0, 7, 2)], gated=[0], latched=[])
        step = GatedStep(1, plan, np.array([[-1.0, 1.0]], np.float32), lambda: None, None, layer_last=3)
        request.gates = (gate(after),)
        assert step.opened(request)(1, 7, 9).tolist() == marks
        assert step.opened(request)(1, 8, 9).tolist() == marks[1:]
