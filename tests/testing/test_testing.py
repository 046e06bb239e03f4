"""`capflow.testing`: its rules tell good consumers from broken ones, each broken one by the rule that it breaks."""

import inspect
import time

import pytest

from capflow import limits
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError
from capflow.plugins.configure import ConfiguredConsumer
from capflow.steering.action import Abort
from capflow.testing import MemoryHub, checks, conformance
from capflow.testing.conformance import Conformance
from tests.kit.broken import BROKEN, Counting, Slow, ThreadsStay, lines
from tests.kit.waiting import eventually

RULES = [name for name, _ in inspect.getmembers(Conformance, inspect.isfunction) if name.startswith("test_")]

TestCounting = pytest.mark.long(conformance(Counting, {"path": "counts.jsonl"}, kept=lines))


@pytest.fixture(autouse=True)
def threads_end():
    """Let the threads that a broken consumer leaves behind end."""
    ThreadsStay.over.clear()
    yield
    ThreadsStay.over.set()


def rules_of(consumer):
    return conformance(consumer, {"path": "counts.jsonl"}, kept=lines, handle_s_max=1.0 if consumer is Slow else 10.0)()


@pytest.mark.parametrize("consumer", BROKEN, ids=lambda consumer: consumer.__name__)
def test_a_broken_consumer_fails_at_the_rule_that_it_breaks(consumer, tmp_path, monkeypatch):
    rule, message = BROKEN[consumer]
    monkeypatch.setattr(checks, "_ENDS_S", 1.0)  # for threads that never end
    with pytest.raises(Exception) as failed:
        getattr(rules_of(consumer), rule)(tmp_path)
    assert message in str(failed.value)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("consumer", BROKEN, ids=lambda consumer: consumer.__name__)
def test_a_broken_consumer_keeps_the_other_rules(consumer, rule, tmp_path):
    if rule != BROKEN[consumer][0]:
        getattr(rules_of(consumer), rule)(tmp_path)


class Steering(Counting):
    """Steers each request once."""

    def open(self, context):
        super().open(context)
        self.context = context

    def take(self, frame, chunk):
        if chunk.start == 0:
            self.context.act(Abort(chunk.request.id))
        super().take(frame, chunk)


def test_a_memory_hubs_engine_takes_actions(tmp_path):
    with MemoryHub(ConfiguredConsumer.of(Steering(Counting.Config(str(tmp_path / "c.jsonl"))), policy="block")) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        eventually(engine.actions)
        assert engine.actions() == [Abort("r1")]
        eventually(lambda: hub.lanes[0].counts["actions_applied"] == 1)


def test_engines_of_a_memory_hub_are_alive_however_long_a_test_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "SILENCE_S_MAX", 0.8)
    with MemoryHub(ConfiguredConsumer.of(Counting(Counting.Config(str(tmp_path / "c.jsonl"))), policy="block")) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        turned = time.monotonic()
        eventually(lambda: time.monotonic() > turned + 2.5)
        engine.finish("r1")
        assert hub.result("r1").status == "ok"
        assert hub.hub.status()["sessions_lost"] == 0


def test_a_hub_that_refuses_an_engine_says_why(tmp_path):
    class Deep(Counting):
        def spec(self):
            return CaptureSpec({"post_block": [9]})

    with (
        MemoryHub(Deep(Counting.Config(str(tmp_path / "c.jsonl")))) as hub,
        pytest.raises(CapflowError, match="refused engine"),
    ):
        hub.engine()


def test_every_rule_has_a_consumer_that_breaks_it():
    assert {rule for rule, _ in BROKEN.values()} == set(RULES)


def test_every_rule_says_what_it_is_about():
    assert all(inspect.getdoc(getattr(Conformance, rule)) for rule in RULES)
