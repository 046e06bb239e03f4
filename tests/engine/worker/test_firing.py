"""The gates of a step, as they were when it was launched."""

import math
from types import SimpleNamespace

import numpy as np

from capflow.steering.program import ProgramGate
from capflow_engine.scheduler.orders import Marked
from capflow_engine.taps.acting import Acts, SlotRange
from capflow_engine.taps.bank import NOTHING
from capflow_engine.taps.plan import Scheduled
from capflow_engine.worker.gates.firing import GatedStep


def gate(sharpness):
    return ProgramGate("rude", sharpness, layer=1, hook="post_block")


def step_of(request, history, gates, layer_last):
    """Return a step of two tokens, of which the gates are open at the second."""
    plan = SimpleNamespace(batch=[Scheduled(request, 0, 7, 2)], gated=[0], latched=[], histories={0: history})
    return GatedStep(1, plan, np.array([[-1.0, 1.0]] * gates, np.float32), lambda: None, None, layer_last)


def test_the_last_stage_marks_what_gates_open_and_earlier_ones_count_them_as_closed():
    request = SimpleNamespace(key="key", steered=None, gates=(gate(math.inf),))
    history = (SlotRange(0, 7, NOTHING, Acts(prefill=1, decode=1)),)
    assert list(step_of(request, history, 1, layer_last=3).marked()) == [Marked(1, "key", (1, 2))]
    first = step_of(request, history, 1, layer_last=0)
    assert first.opened(request)(1, 7, 9).tolist() == [False, False]
    assert list(first.marked()) == []


def test_rejected_drafts_of_earlier_steps_lower_where_gates_are_open():
    request = SimpleNamespace(key="key", steered=None, gates=(gate(math.inf),))
    step = step_of(request, (SlotRange(0, 7, NOTHING, Acts(prefill=1, decode=1)),), 1, layer_last=3)
    step.shifts["key"] = 2
    assert step.opened(request)(1, 5, 7).tolist() == [False, True]
    # Marks count from the first position of the step, wherever it is.
    assert list(step.marked()) == [Marked(1, "key", (1, 2))]


def test_rows_are_marked_by_the_gates_that_they_had_though_an_action_changed_them_since():
    """A soft gate acts where a hard one is closed."""
    for before, after, marks in ((math.inf, 2.0, [False, True]), (2.0, math.inf, [True, True])):
        request = SimpleNamespace(key="key", steered=None, gates=(gate(before),))
        plan = SimpleNamespace(batch=[Scheduled(request, 0, 7, 2)], gated=[0], latched=[])
        step = GatedStep(1, plan, np.array([[-1.0, 1.0]], np.float32), lambda: None, None, layer_last=3)
        request.gates = (gate(after),)
        assert step.opened(request)(1, 7, 9).tolist() == marks
        assert step.opened(request)(1, 8, 9).tolist() == marks[1:]
