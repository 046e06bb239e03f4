"""What a request may ask for, is refused and is answered: the same over HTTP, over gRPC and in Python."""

import json

import pytest

pytest.importorskip("vllm")

import capflow
from capflow.capture.site import Site
from capflow.steering.request import Steering
from tests.kit import doors
from tests.kit.doors import CAPTURED, DOORS, HTTP, LLM, REFUSED, STEERED, TOKENS, RefusedError
from tests.kit.engines import engine, relative_error
from tests.kit.rows import FLOAT32_BOUND

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def llm(tiny_with_words, tmp_path_factory):
    """An engine in this process with the server's module, and the directory of its rows."""
    root = tmp_path_factory.mktemp("rows")
    with engine(tiny_with_words, consumers=[f"filesystem:root={root},capture=requests"]) as llm:
        llm.steering.register("one", Steering.parse({f"steering_{name}": each for name, each in doors.MODULE.items()}))
        yield llm, root


@pytest.fixture
def through(request):
    """Return the door of a name, and the directory of the rows behind it."""

    def through(door):
        if door in LLM:
            llm, root = request.getfixturevalue("llm")
            return doors.python(llm), root
        served = request.getfixturevalue("served")
        ask = doors.http(served, door) if door in HTTP else doors.rpc(served, stream=door == "GenerateStream")
        return ask, served.root

    return through


@pytest.mark.parametrize("door", sorted(DOORS))
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_field_is_refused_by_its_path_before_anything_runs(through, door, case):
    wrong = REFUSED[case]
    if door not in wrong.doors:
        pytest.skip("this door has no such field")
    ask, _ = through(door)
    with pytest.raises(RefusedError) as refused:
        ask(wrong.fields)
    result = refused.value
    assert (result.field, result.unknown) == (wrong.field, wrong.unknown), result.message
    assert wrong.words in result.message
    assert "\n" not in result.message


@pytest.mark.parametrize("door", sorted(DOORS))
@pytest.mark.parametrize("case", CAPTURED)
def test_a_request_that_waited_has_its_rows(through, reference, door, case):
    spec, tag, meant = CAPTURED[case]
    ask, root = through(door)
    name = f"{case} {door}"
    answer = ask({"capture": spec, "capture_wait": True, "capture_id": name})
    assert answer.result == ("ok", tag)
    capture = capflow.open(root)[name]
    assert (capture.tag, set(capture.sites)) == (tag, {Site(1, "post_block"), Site(3, "post_block")})
    tokens = [*TOKENS, *answer.tokens]
    expected = reference.post_block(tokens)[:, :-1]
    for site in capture.sites:
        assert capture[site].positions.tolist() == list(range(len(tokens) - 1))[meant]
        assert relative_error(capture[site].rows, expected[site.layer][meant]) < FLOAT32_BOUND


@pytest.fixture(scope="module")
def answers(llm):
    """What `capflow.LLM` answers to each case, and without steering."""
    ask = doors.python(llm[0])
    return {None: ask({})} | {case: ask(fields) for case, (fields, _) in STEERED.items()}


@pytest.mark.parametrize("door", sorted(DOORS))
@pytest.mark.parametrize("case", STEERED)
def test_what_steers_changes_the_answer_alike_and_is_reported_alike(through, answers, door, case):
    fields, report = STEERED[case]
    ask, _ = through(door)
    answer = ask({**fields, "steering_report": True})
    assert answer.tokens == answers[case].tokens != answers[None].tokens
    nothing = {"prefill": {}, "decode": {}, "patched": {}, "modules": {}, "global": False}
    assert answer.steering == {"key": answers[case].key, **nothing, **report}
    assert answer.key == answers[case].key


@pytest.mark.parametrize("door", sorted(HTTP))
def test_the_same_in_vllm_xargs_steers_alike(through, door):
    ask, _ = through(door)
    fields, _ = STEERED["layers"]
    assert ask({"vllm_xargs": {"capflow": json.dumps(fields)}}) == ask(fields)


@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_request_that_asks_for_nothing_is_told_nothing(through, answers, door):
    ask, _ = through(door)
    assert ask({}) == answers[None]
    assert answers[None][1:] == (None, None, None)
