"""`capflow.testing`: its rules tell good consumers from broken ones, each broken one by the rule that it breaks."""

import inspect

import pytest
from broken import BROKEN, Counting, ThreadsStay, lines

from capflow.testing import conformance
from capflow.testing.conformance import Conformance

RULES = [name for name, _ in inspect.getmembers(Conformance, inspect.isfunction) if name.startswith("test_")]

TestCounting = conformance(Counting, {"path": "counts.jsonl"}, kept=lines)


@pytest.fixture(autouse=True)
def threads_end():
    """Let the threads that a broken consumer leaves behind end."""
    ThreadsStay.over.clear()
    yield
    ThreadsStay.over.set()


def rules_of(consumer):
    return conformance(consumer, {"path": "counts.jsonl"}, kept=lines, handle_s_max=2.0)()


@pytest.mark.parametrize("consumer", BROKEN, ids=lambda consumer: consumer.__name__)
def test_a_broken_consumer_fails_at_the_rule_that_it_breaks(consumer, tmp_path):
    rule, said = BROKEN[consumer]
    with pytest.raises(Exception) as failed:
        getattr(rules_of(consumer), rule)(tmp_path)
    assert said in str(failed.value)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("consumer", BROKEN, ids=lambda consumer: consumer.__name__)
def test_a_broken_consumer_keeps_the_other_rules(consumer, rule, tmp_path):
    if rule != BROKEN[consumer][0]:
        getattr(rules_of(consumer), rule)(tmp_path)


def test_every_rule_has_a_consumer_that_breaks_it():
    assert {rule for rule, _ in BROKEN.values()} == set(RULES)


def test_every_rule_says_what_it_is_about():
    assert all(inspect.getdoc(getattr(Conformance, rule)) for rule in RULES)
