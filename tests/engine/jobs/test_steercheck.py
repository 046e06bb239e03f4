"""The check of steering: the meaning of its numbers; it passes steering that works and fails steering that does not."""

import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from capflow.errors import CapflowError
from capflow.steering.report import Apart, AppliedCheck, Cost, Fired, Mates, Report
from capflow_engine.jobs.trial import Answer, apart, moved

SAME = Apart(0.0, 8, 8)
OTHER = Apart(0.5, 2, 8)
FIRED = Fired("post_block:1", noise=0.0, moved=0.5, decode_moved=0.4, changed_before=0.0, patched_apart=1e-6)
MATES = Mates(1, noise=SAME, beside=SAME, after=SAME, alone=SAME, vllm=SAME, mates={"vectors": 0.5})
APPLIED = AppliedCheck("key", {"post_block:1": 1}, {"post_block:1": 1}, ["post_block:1"])
FINE = Report("m", "float32", compiled=True, taps=1, fired=[FIRED], mates=MATES, applied=APPLIED, cost=None)
replace = msgspec.structs.replace


def fired(**changed):
    return replace(FINE, fired=[replace(FIRED, **changed)])


def mates(**changed):
    return replace(FINE, mates=replace(MATES, **changed))


BROKEN = {
    "a vector added to the prompt changes nothing": fired(moved=0.0),
    "a vector added to generated tokens changes nothing": fired(decode_moved=0.0),
    "4.0e-01, the noise is largest |Δ logprob| 9.0e-02": fired(noise=0.09),
    "changes rows before it by 5.0e-01": fired(changed_before=0.5),
    "1.0e+00 apart, expected 0.01 at most": fired(patched_apart=1.0),
    "no site can be steered": replace(FINE, fired=[]),
    "mates with vectors: steering them changes nothing": mates(mates={"vectors": 0.0}),
    "beside steered requests answer differently": mates(beside=OTHER),
    "after steered requests answer differently": mates(after=OTHER),
    "plain requests sent alone answer differently": mates(alone=OTHER),
    "plain requests in vLLM without capflow answer differently": mates(vllm=OTHER),
    "the applied set names 0 and 1 sites": replace(FINE, applied=replace(APPLIED, prefill={})),
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_number_can_fail_the_check_and_says_what_to_do(message):
    (failure,) = BROKEN[message].failures()
    assert message in failure
    assert "; " in failure


def test_numbers_that_are_right_fail_nothing():
    assert FINE.failures() == []


def test_a_cost_fails_nothing():
    assert replace(FINE, cost=Cost(1, {"plain": [1.0] * 4, "idle": [9.0] * 4, "steered": [9.0] * 4})).failures() == []


def test_in_half_precision_only_batches_of_one_shape_must_agree():
    half = replace(FINE, dtype="bfloat16")
    assert replace(half, mates=replace(MATES, alone=OTHER, vllm=OTHER)).failures() == []
    assert len(replace(half, mates=replace(MATES, beside=OTHER)).failures()) == 1


def test_mates_may_differ_as_two_runs_of_the_same_batch_do():
    noisy = replace(MATES, noise=Apart(0.1, 8, 8), beside=Apart(0.15, 8, 8))
    assert replace(FINE, mates=noisy).failures() == []
    assert len(replace(FINE, mates=replace(noisy, beside=Apart(0.25, 8, 8))).failures()) == 1


@pytest.mark.parametrize(
    ("idle", "verdict"),
    [
        ([1.0] * 4, "met"),
        ([1.1] * 4, "missed"),
        ([0.8, 0.9, 1.1, 1.2], "too noisy to tell"),
        ([1.0] * 3, "too few turns to tell"),
    ],
)
def test_a_goal_is_judged_only_when_turns_agree(idle, verdict):
    cost = Cost(100, {"plain": [1.0] * len(idle), "idle": idle, "steered": idle})
    assert cost.verdict("idle") == verdict
    assert cost.ratio("idle") == pytest.approx(1 / np.median(idle))


def test_answers_are_compared_up_to_where_one_goes_another_way():
    one = Answer([1, 2, 3], [{1: -1.0, 2: -2.0}, {2: -1.0, 3: -2.0}, {3: -9.0, 4: -9.5}])
    other = Answer([1, 3, 3], [{1: -1.0, 2: -2.0}, {2: -1.25, 3: -1.2}, {3: -1.0, 4: -2.0}])
    assert apart([one], [other]) == Apart(pytest.approx(0.8), 1, 3)
    assert apart([one], [one]) == Apart(0.0, 3, 3)


def test_a_token_that_is_known_on_one_side_is_as_far_as_it_is_at_least():
    assert moved({1: -1.0, 2: -4.0}, {1: -1.0, 3: -2.0}) == pytest.approx(2.0)
    assert moved({1: -1.0, 2: -2.0}, {1: -1.0, 3: -2.0}) == 0.0


def test_logprobs_that_are_not_finite_are_no_agreement():
    with pytest.raises(CapflowError, match="not finite"):
        moved({1: float("nan")}, {1: float("nan")})


def doctor(*arguments):
    command = [sys.executable, "-m", "capflow", "doctor", *arguments]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json"], "--json: expected --steering MODEL with it"),
        (["--turns", "0"], "--turns: expected --steering MODEL with it"),
        (["--steering", "demo", "--no-capture"], "--no-capture: expected to be left out"),
        (["--steering", "demo", "--dtype", "int3"], "'int3' is not one of"),
    ],
)
def test_wrong_options_are_one_line(arguments, words):
    done = doctor(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert words in done.stderr


@pytest.mark.long
@pytest.mark.engine
def test_a_model_that_is_not_there_is_one_line():
    done = doctor("--steering", "nowhere/at-all", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line for line in done.stderr.splitlines() if "nowhere" in line] == [done.stderr.splitlines()[-1]]
    assert done.stderr.splitlines()[-1].startswith("capflow: model nowhere/at-all: got ")


@pytest.mark.engine
@pytest.mark.long
def test_the_command_finds_that_steering_works(tiny):
    done = doctor("--steering", tiny, "--dtype", "float32", "--enforce-eager", "--turns", "1", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert [one["site"] for one in report["fired"]] == ["post_block:0", "post_block:2", "post_block:3"]
    assert all(one["moved"] > 0.1 and one["patched_apart"] < 1e-4 for one in report["fired"])
    assert all(report["mates"][name] == {"logprob": 0.0, "equal": 32, "tokens": 32} for name in ("beside", "alone"))
    assert report["mates"]["vllm"]["equal"] == 64
    assert report["applied"]["prefill"] == {f"post_block:{n}": 1 for n in range(4)}
    assert report["cost"]["turns"] == 1
    assert report["cost"]["modes"]["steered"]["verdict"] == "too few turns to tell"
    assert "capflow: steering at post_block:2" in done.stderr


@pytest.fixture(scope="module")
def tapped(tiny, tmp_path_factory):
    """An engine in this process with a hub that keeps what requests capture, and where it keeps it."""
    from tests.kit.engines import engine

    root = tmp_path_factory.mktemp("rows") / "rows"
    consumers = [f"filesystem:root={root},capture=requests"]
    with engine(tiny, consumers=consumers, sites=["*:*"], enable_prefix_caching=False) as llm:
        yield llm, root


def checked(tapped):
    """Return what is found wrong with steering at a site, and with mates; plain vLLM is not asked."""
    from vllm import SamplingParams

    from capflow_engine.jobs.steercheck import Checks, chosen
    from capflow_engine.jobs.trial import LENGTHS, answers, asks, prompts

    llm, root = tapped
    checks = Checks(llm, root)
    plain = answers(llm, prompts(llm, LENGTHS), SamplingParams(**asks()))
    sites = chosen(checks.sites)
    assert len(sites) == 3 * 12 + 1  # first, middle and last of twelve hooks, and `final`
    fired = [
        checks.fired(site) for site in sites if site == sites[0] or (site.layer == 2 and site.hook in ("k", "neurons"))
    ]
    return replace(FINE, fired=fired).failures(), replace(FINE, mates=checks.mates(plain)).failures()


@pytest.mark.engine
def test_steering_that_does_nothing_fails(tapped, monkeypatch):
    from capflow_engine.taps.bank import Bank

    assert checked(tapped) == ([], [])
    upload, width = Bank._upload, tapped[0].capflow_model.steered_width

    def without_rows(target, lines, values):
        upload(target, lines, np.zeros_like(values) if values.shape[1] == width else values)

    monkeypatch.setattr(Bank, "_upload", staticmethod(without_rows))
    fired, _ = checked(tapped)
    assert sum("a vector added to the prompt changes nothing" in line for line in fired) == 3


@pytest.mark.engine
def test_a_request_that_is_not_steered_at_every_site_fails(tapped):
    """Fields that get lost between what is asked for and the program."""
    from capflow_engine.jobs.steercheck import Checks

    checks = Checks(tapped[0], tapped[1])
    assert list(checks.applied().failures()) == []
    lost = checks.sites[0]
    checks.vectors = {site: vector for site, vector in checks.vectors.items() if site != lost}
    (failure,) = checks.applied().failures()
    assert f"names {len(checks.sites) - 1} and" in failure


@pytest.mark.engine
@pytest.mark.long
def test_steering_at_another_site_fails(tapped, monkeypatch):
    """What is meant for one layer is done at the next."""
    from capflow_engine.taps.bank import Bank

    put = Bank._put

    def shifted(bank, key, ops, program):
        last = max(bank._index.values())
        return put(bank, key, [(min(site + 1, last), each) for site, each in ops], program)

    monkeypatch.setattr(Bank, "_put", shifted)
    fired, _ = checked(tapped)
    assert any("adding it to the captured rows by hand give different answers" in line for line in fired)


@pytest.mark.engine
@pytest.mark.long
def test_a_mate_that_is_touched_fails(tapped, monkeypatch):
    """Each token of a step is steered by what steers any of them."""
    from capflow_engine.taps.plan import Plan

    slots = Plan.slots

    def everybody(plan, tokens):
        return np.full(tokens, slots(plan, tokens).max(initial=-1), np.int32)

    monkeypatch.setattr(Plan, "slots", everybody)
    _, mates = checked(tapped)
    assert any("plain requests beside steered requests answer differently" in line for line in mates)
