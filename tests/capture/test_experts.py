"""The choice of experts against a loop in float64, and the forms that say how a router chooses."""

import math

import ml_dtypes
import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.attention import grouped_forms
from capflow.capture.router import RouterForm
from capflow.capture.site import Site
from capflow.errors import RemoteProtocolError, UsageError
from capflow.protocol.message import Hello
from capflow.protocol.session import HubSession
from tests.kit.frames import make_model
from tests.kit.sessions import encoded

EXPERTS = 12
FORMS = {
    "softmax": RouterForm(3),
    "renormalised": RouterForm(3, renormalised=True, on_input=True),
    "sigmoid": RouterForm(2, "sigmoid", scale=2.5),
    "all": RouterForm(EXPERTS, "sigmoid", renormalised=True),
    "groups": RouterForm(4, n_group=4, topk_group=2, scale=16.0),
    "biased": RouterForm(3, biased=True),
    "biased groups": RouterForm(4, "sigmoid", renormalised=True, n_group=3, topk_group=2, biased=True, scale=2.5),
}


def expected_of(row, form, bias):
    """Return the experts of a token and their weights."""
    row = [float(number) for number in row]
    total = sum(math.exp(number) for number in row)
    scores = [math.exp(x) / total if form.scores == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
    ranked = [score + float(added) for score, added in zip(scores, bias, strict=True)]
    size = len(row) // form.n_group
    groups = [sorted(ranked[n * size : (n + 1) * size], reverse=True) for n in range(form.n_group)]
    best = [sum(group[:2]) if form.biased else group[0] for group in groups]
    open_groups = sorted(range(form.n_group), key=lambda n: (-best[n], n))[: form.topk_group]
    experts = [n for n in range(len(row)) if n // size in open_groups]
    chosen = sorted(experts, key=lambda n: (-ranked[n], n))[: form.top_k]
    divisor = sum(scores[n] for n in chosen) if form.renormalised else 1.0
    weights = {n: scores[n] / divisor * form.scale for n in chosen}
    ids = sorted(chosen, key=lambda n: -weights[n])
    return ids, [weights[n] for n in ids]


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_those_of_a_loop(name):
    form = FORMS[name]
    rng = np.random.default_rng(5)
    # Many logits of a token are equal, in any dtype.
    logits = np.round(16 * rng.standard_normal((200, EXPERTS))) / 8
    bias = rng.uniform(-0.3, 0.3, EXPERTS) if form.biased else np.zeros(EXPERTS)
    given = {"bias": bias} if form.biased else {}
    assert sum(len(set(row)) < EXPERTS for row in logits.tolist()) > 100
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        rows = logits.astype(dtype)
        ids, weights = capflow.chosen_experts(rows, form, **given)
        assert ids.shape == weights.shape == (200, form.top_k)
        assert weights.dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert ids.dtype == np.int64
        for n, row in enumerate(rows):
            expected_ids, expected_weights = expected_of(row, form, bias)
            assert ids[n].tolist() == expected_ids
            assert np.abs(weights[n] - expected_weights).max() < 1e-5 * form.scale
    assert form.top_k == EXPERTS or len(set(ids.ravel().tolist())) == EXPERTS


def test_large_logits_and_equal_ones():
    rows = np.array([[1e4, -1e4, 1e4, 0.0], [-1e4, -1e4, -2e4, -1e4]], np.float32)
    ids, weights = capflow.chosen_experts(rows, RouterForm(2, renormalised=True))
    assert ids.tolist() == [[0, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    # Logits choose among experts whose scores round to 0.
    ids, weights = capflow.chosen_experts(np.array([[-1e4, 1e4, -1e3, 0]], np.float32), RouterForm(4))
    assert ids.tolist() == [[1, 3, 2, 0]]
    assert weights.tolist() == [[1, 0, 0, 0]]
    ids, weights = capflow.chosen_experts(rows, RouterForm(2, "sigmoid", renormalised=True))
    assert ids.tolist() == [[0, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert np.isnan(capflow.chosen_experts(np.full((1, 4), np.inf, np.float32), RouterForm(2)).weights).all()
    assert capflow.chosen_experts(rows[:0], FORMS["softmax"]).ids.shape == (0, 3)


LOGITS = np.zeros((2, EXPERTS), np.float32)


@pytest.mark.parametrize(
    ("logits", "form", "bias", "message"),
    [
        (LOGITS[0], FORMS["softmax"], None, r"logits: got an array [12], expected [tokens, experts]"),
        (LOGITS[:, :2], FORMS["softmax"], None, "logits: got 2 experts, expected experts in 1 groups, and 3 of them"),
        (LOGITS[:, :10], FORMS["groups"], None, "logits: got 10 experts, expected experts in 4 groups, and 4 of them"),
        (LOGITS[:, :4], FORMS["groups"], None, "logits: got 4 experts, expected experts in 4 groups, and 4 of them in"),
        (LOGITS, FORMS["biased"], None, "bias: got none, expected 12 numbers, one for each expert; take"),
        (LOGITS, FORMS["biased"], [0.1] * 3, "bias: got float64 [3], expected 12 numbers, one for each expert"),
        (LOGITS, FORMS["biased"], ["a"] * 12, "bias: got <U1 [12], expected 12 numbers, one for each expert"),
        (
            LOGITS,
            FORMS["softmax"],
            [0.1] * 12,
            "bias: got [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, ...], expected none for this layer",
        ),
        (LOGITS, RouterForm(1, lacks="a coin"), None, "experts: got a coin, expected a choice by the router's logits"),
    ],
)
def test_what_does_not_fit_is_refused(logits, form, bias, message):
    with pytest.raises(UsageError) as refused:
        capflow.chosen_experts(logits, form, bias=bias)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_a_model_says_the_form_of_each_layer():
    forms = {0: FORMS["softmax"], 1: FORMS["groups"], 3: FORMS["softmax"]}
    sites = tuple(Site(layer, "router") for layer in range(4))
    model = msgspec.structs.replace(make_model(), sites=sites, router=grouped_forms(forms))
    assert [(form.top_k, layers) for form, layers in model.router] == [(3, (0, 3)), (4, (1,))]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=capflow.ModelInfo)
    assert {layer: decoded.router_of(layer) for layer in range(4)} == {**forms, 2: None}
    assert grouped_forms({}) is msgspec.UNSET
    # The bytes of a model without experts are what they were.
    assert b"\xa6router" not in msgspec.msgpack.encode(make_model())
    assert b"\xa6router" in msgspec.msgpack.encode(model)


@pytest.mark.parametrize("field", [{"scale": math.nan}, {"topk_group": 2}, {"top_k": 0}, {"n_group": 0}])
def test_a_form_of_wrong_numbers_is_refused(field):
    with pytest.raises(ValueError, match=r"^expected a finite scale, at most n_group chosen groups, and an expert"):
        RouterForm(**({"top_k": 1} | field))


def test_a_form_of_a_layer_without_a_tap_is_a_protocol_error():
    model = msgspec.structs.replace(make_model(), router=grouped_forms({0: FORMS["softmax"]}))
    with pytest.raises(
        RemoteProtocolError, match=r"^hello.model.router: got \(0,\), expected layers with router among"
    ):
        HubSession().receive(encoded(Hello("scheduler", "e", "boot", model=model)), 1.0)
