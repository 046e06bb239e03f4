"""Answers to actions on requests with drafts under way: they wait, and their positions are corrected."""

import pytest

from capflow.steering.action import ActionApplied


@pytest.fixture
def sent():
    return []


@pytest.fixture
def answers(sent):
    from capflow_engine.scheduler.answers import CertainAnswers

    return CertainAnswers(sent.append)


def step(**drafts):
    """Return a step with drafts: by request, the position after the last one and their number."""
    from capflow_engine.scheduler.answers import UnderWay

    return UnderWay(dict.fromkeys(drafts, 4), drafts)


def test_an_answer_waits_until_the_drafts_of_earlier_steps_are_decided(answers, sent):
    answers.apply("k", ActionApplied("0/a", 7, 29))
    answers.settle({6: step(k=(29, 3)), 7: step(k=(33, 3))})
    assert sent == []
    answers.shift("k", 29, 2)
    answers.settle({7: step(k=(31, 3))})
    assert sent == [ActionApplied("0/a", 7, 27)]
    answers.settle({})
    assert len(sent) == 1


def test_an_answer_waits_for_no_drafts_of_its_own_step_or_of_other_requests(answers, sent):
    answers.apply("k", ActionApplied("0/a", 7, 29))
    answers.apply("", ActionApplied("0/b", 7))
    answers.settle({6: step(other=(12, 3)), 7: step(k=(33, 3))})
    assert [each.id for each in sent] == ["0/a", "0/b"]


def test_drafts_lower_no_position_before_them_and_none_of_another_request(answers, sent):
    for number, (key, position) in enumerate((("k", 28), ("other", 29), ("", None))):
        answers.apply(key, ActionApplied(f"0/{number}", 7, position))
    answers.shift("k", 29, 2)
    answers.settle({})
    assert [each.position for each in sent] == [28, 29, None]


def test_the_end_of_a_request_sends_its_answers_alone(answers, sent):
    answers.apply("k", ActionApplied("0/a", 7, 29))
    answers.apply("other", ActionApplied("0/b", 7, 12))
    answers.end("k")
    assert [each.id for each in sent] == ["0/a"]
