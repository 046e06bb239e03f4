"""Random actions while their hub and their clients are killed: each is answered once, and holds as it was answered.

`CAPFLOW_ACTIONS` is the number of actions of the long test, by default 10,000; `CAPFLOW_ACTIONS_SEED` its seed.
"""

import os

import pytest

from tests.kit.acting import Acting

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

ACTIONS = int(os.environ.get("CAPFLOW_ACTIONS", "10000"))
SEED = int(os.environ.get("CAPFLOW_ACTIONS_SEED", "1"))


def check(acting):
    assert not acting.wrong, "\n".join([f"{len(acting.wrong)} are wrong", *map(str, acting.wrong[:10])])
    seen = ("hub", "client", "applied", "rejected", "lease ends", "changed positions", "preempted")
    assert all(acting.counts[each] for each in seen), acting.counts
    assert acting.counts["undecided"] <= acting.counts["requests"] // 4, f"unchecked requests: {acting.counts}"


def test_what_was_answered_holds_and_nothing_else(tiny, capsys):
    acting = Acting(tiny)
    acting.run(250, pause_s=(0.5, 1.5))
    with capsys.disabled():
        print(f"\nactions: {dict(acting.counts)}")
    check(acting)


@pytest.mark.long
def test_ten_thousand_actions_through_kills(tiny, capsys):
    acting = Acting(tiny, SEED)
    acting.run(ACTIONS, pause_s=(2.0, 6.0))
    with capsys.disabled():
        print(f"\nactions: seed {SEED}, {dict(acting.counts)}")
    check(acting)
