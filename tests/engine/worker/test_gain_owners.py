"""A controller's gain: the owner must be one that contributes, or may contribute, to the request."""

import pytest
import torch

from capflow.errors import UsageError
from capflow.steering.action import Gain
from capflow_engine.steering.budget import Size
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.history import Histories, Owner
from tests.kit.frames import make_model

SIZE = Size(64, 256, 64)
MODEL = make_model(hidden=8)


@pytest.mark.parametrize(
    ("owner", "contributes"),
    [("request", True), ("client", True), ("client KEY", True), ("controller gate", True),
     ("modul calm", False), ("module calm", False), ("controller gat", False)],
)  # fmt: skip
def test_a_gain_of_an_owner_that_does_not_contribute_is_refused(owner, contributes):
    bank = Bank(SIZE.plus(SIZE), {MODEL.sites[0]: 0}, 8, torch.device("cpu"))
    histories, nothing = Histories(bank, SIZE, MODEL), Planner(1).nothing
    tracked = Tracked("r", "r", 4, nothing, nothing, computed=4)
    act = lambda: histories.act(tracked, Owner(0, "gate"), Gain("r", owner, 0.0), controllers=["gate"])  # noqa: E731
    if contributes:
        assert act()
    else:
        with pytest.raises(UsageError, match=f"gain.owner: got {owner}, expected one that contributes: client, "):
            act()
