"""What controllers of one pipeline stage steer, as the other stages hear of it."""

import numpy as np
import pytest

from capflow.capture.frame import mask_of
from capflow_engine.scheduler.orders import Marked, StepAnswer
from capflow_engine.taps.acting import ALWAYS, Acts, SlotRange
from capflow_engine.taps.bank import NOTHING
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.marks import StageMarks, clipped, controlled_runs, merged
from capflow_engine.worker.pending import Pending, bare


def held(first, acts, key, shared):
    return SlotRange(first, 4, NOTHING, acts, key, shared)


PLAIN = held(0, Acts(ALWAYS, ALWAYS), 7, 7)
ADDED, TAKEN_BACK = held(10, Acts(ALWAYS, ALWAYS), 9, 7), held(14, Acts(ALWAYS, ALWAYS), 7, 7)


def test_only_what_controllers_add_is_marked_and_counted_from_the_step_s_first_position():
    history = [PLAIN, ADDED, TAKEN_BACK]
    assert controlled_runs(history, 8, 10) == (2, 6)
    assert controlled_runs(history, 11, 1) == (0, 1)
    assert controlled_runs([PLAIN], 8, 10) == ()


def test_a_hard_gate_of_the_request_is_left_to_the_stages_which_know_it():
    assert controlled_runs([held(10, Acts(0, 1), 9, 7)], 8, 10) == ()


def test_stages_hand_their_marks_on_and_the_last_one_gives_all_of_them_once():
    planner = Planner(2)
    marks = []
    for history in ([PLAIN, ADDED], [PLAIN], [held(0, Acts(0, 0), 7, 7), held(12, Acts(0, ALWAYS), 8, 7)]):
        request = Tracked("k", "r", 4, planner.nothing, planner.nothing, steered=history)
        stage = StageMarks()
        stage.begin(5, planner.plan([Scheduled(request, 0, 9, 2)]))
        if marks and (data := marks[-1].data):
            stage.receive(data)
        marks.append(stage)
    assert marks[-1].data
    marked = marks[-1].take()
    assert marked == (Marked(5, "k", (1, 2)),)
    assert marks[-1].take() == ()
    assert StepAnswer.decode(StepAnswer((), marked).encode()).marked == [Marked(5, "k", (1, 2))]
    assert StepAnswer().encode() == b""


def test_an_unsettled_step_takes_marks_and_a_settled_one_is_past():
    pending = Pending()
    pending.add(bare(5))
    pending.mark([Marked(5, "k", (1, 2)), Marked(5, "k", (2, 4)), Marked(4, "k", (0, 1))])
    (step,) = pending.settle(5)
    assert step.marks == {"k": (1, 4)}


@pytest.mark.parametrize("seed", range(50))
def test_runs_are_merged_and_clipped_as_sets_of_positions(seed):
    from capflow.capture.frame import runs_of

    random = np.random.default_rng(seed)
    one, other = random.random((2, 12)) < 0.5
    union = merged(runs_of(one, 3), runs_of(other, 3))
    assert (mask_of(union, 3, 15) == (one | other)).all()
    assert (mask_of(clipped(union, 5, 9), 5, 9) == (one | other)[2:6]).all()
