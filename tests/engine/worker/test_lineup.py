"""The requests of a step's batch are those that run, also after a change of either."""

import numpy as np
import pytest

from capflow_engine.taps.plan import Planner
from capflow_engine.taps.requests import Tracked

pytest.importorskip("vllm")


@pytest.fixture
def requests():
    nothing = Planner(1).nothing
    return {key: Tracked(key, key, 4, nothing, nothing) for key in "abc"}


def batch(keys, starts, lengths):
    from capflow_engine.compat.step import RunnerBatch

    return RunnerBatch(keys, np.array(starts), np.array(lengths))


@pytest.mark.engine
def test_a_batch_is_looked_up_once_while_nothing_changes(requests):
    from capflow_engine.worker.lineup import Lineup

    lineup, keys = Lineup(requests), ["b", "a"]
    first, second = lineup.of(batch(keys, [7, 4], [1, 3])), lineup.of(batch(keys, [8, 7], [1, 2]))
    assert [part[1:] for part in first] == [(0, 7, 1), (1, 4, 3)]
    assert [part[1:] for part in second] == [(0, 8, 1), (1, 7, 2)]
    assert first.requests is second.requests
    keys[:] = ["a", "b"]  # the list is the runner's own
    assert [part.request.key for part in lineup.of(batch(keys, [9, 9], [1, 1]))] == ["a", "b"]


@pytest.mark.engine
def test_a_request_that_was_replaced_or_ended_is_in_no_later_batch(requests):
    from capflow_engine.worker.lineup import Lineup

    lineup = Lineup(requests)
    lineup.of(batch(["a", "b"], [0, 0], [1, 1]))
    requests["b"] = longer = Tracked("b", "b", 9, requests["a"].ship, requests["a"].view)
    lineup.change()
    assert lineup.of(batch(["a", "b"], [1, 1], [1, 1])).requests[1] is longer
    del requests["a"]
    lineup.change()
    (part,) = lineup.of(batch(["a", "b"], [2, 2], [3, 1]))
    assert (part.request, part.row, part.start, part.length) == (longer, 3, 2, 1)
