"""Attention weights against a loop in float64, and the forms that say how they are made."""

import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

import capflow
from capflow import attention, limits
from capflow.capture.attention import AttentionForm, grouped_forms
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import RemoteProtocolError, UsageError
from capflow.protocol.message import Hello
from capflow.protocol.session import HubSession
from tests.kit.frames import make_model
from tests.kit.sessions import encoded

FORMS = {
    "full": AttentionForm(0.2),
    "window": AttentionForm(0.2, window=5),
    "window of one": AttentionForm(0.2, window=1),
    "soft cap": AttentionForm(0.7, soft_cap=1.5),
    "both": AttentionForm(0.7, window=4, soft_cap=1.5),
    "sinks": AttentionForm(0.2, window=5, sinks=True),
}
SINKS = [0.5, -3.0, 2.0, 40.0, 0.0, -1.0]  # the fourth takes nearly all


def rows(count, heads, seed, head_dim=8):
    return np.random.default_rng(seed).standard_normal((count, heads, head_dim)) * 2


def loop(q, k, form, positions, sinks=None):
    """Return the weights, one query and one head at a time."""
    weights = np.zeros((q.shape[1], len(q), len(k)))
    for head in range(q.shape[1]):
        for number, position in enumerate(positions):
            logits = {}
            for key in range(position + 1):
                if form.window is None or position - key < form.window:
                    logit = form.scale * math.fsum(q[number, head] * k[key, head * k.shape[1] // q.shape[1]])
                    logits[key] = logit if form.soft_cap is None else form.soft_cap * math.tanh(logit / form.soft_cap)
            total = math.fsum(map(math.exp, [*logits.values(), *([] if sinks is None else [sinks[head]])]))
            for key, logit in logits.items():
                weights[head, number, key] = math.exp(logit) / total
    return weights


@pytest.mark.parametrize("tile_bytes", [attention.TILE_BYTES, 200, 1], ids=["one tile", "tiles", "single queries"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weights_are_those_of_a_loop(form, tile_bytes, monkeypatch):
    monkeypatch.setattr(attention, "TILE_BYTES", tile_bytes)
    q, k = rows(11, 6, 1), rows(13, 2, 2)
    sinks = SINKS if form.sinks else None
    for given, positions in ({"start": 2}, range(2, 13)), ({"positions": (p := [12, 0, 5, 5, *range(7)])}, p):
        given["sinks"] = sinks
        expected = loop(q, k, form, positions, sinks)
        weights = capflow.attention_weights(q, k, form, **given)
        assert weights.dtype == np.float64
        assert np.abs(weights - expected).max() < 1e-14
        spans = {"first": (0, 1), "middle": (3, 9), "all": (0, 13)}
        sums = capflow.attention_weights(q, k, form, heads=[5, 0], spans=spans, **given)
        assert np.abs(sums - np.stack([expected[[5, 0], :, a:b].sum(-1) for a, b in spans.values()], -1)).max() < 1e-14
        if not form.sinks:
            assert np.abs(sums[..., 2] - 1).max() < 1e-14


def test_narrow_rows_are_compared_in_float32():
    q, k = rows(9, 4, 3), rows(9, 4, 4)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        narrow = [each.astype(dtype) for each in (q, k)]
        weights = capflow.attention_weights(*narrow, FORMS["both"])
        assert weights.dtype == np.float32
        wide = [each.astype(np.float64) for each in narrow]
        assert np.abs(weights - capflow.attention_weights(*wide, FORMS["both"])).max() < 1e-6
    # Logits whose exponential is beyond float32.
    large = [(40 * q).astype(np.float32), k.astype(np.float32)]
    assert np.abs(capflow.attention_weights(*large, FORMS["full"]).sum(-1) - 1).max() < 1e-5
    beyond = capflow.attention_weights(*large, FORMS["sinks"], sinks=[1e4, -1e4, 1e4, -1e4])
    assert not beyond[[0, 2]].any()
    assert np.abs(beyond[[1, 3]].sum(-1) - 1).max() < 1e-5


def test_sinks_of_any_dtype_are_taken():
    q, k = rows(3, 4, 3), rows(3, 4, 4)
    exact = [0.5, -3.0, 2.0, 0.0]
    expected = capflow.attention_weights(q, k, FORMS["sinks"], sinks=exact)
    for sinks in (
        np.array(exact, ml_dtypes.bfloat16),
        torch.nn.Parameter(torch.tensor(exact, dtype=torch.bfloat16)),
        torch.tensor(exact, dtype=torch.float16),
    ):
        assert np.array_equal(capflow.attention_weights(q, k, FORMS["sinks"], sinks=sinks), expected)


Q, K, FULL = rows(4, 4, 1), rows(4, 2, 2), FORMS["full"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: got an array \[4, 8\], expected \[q rows, heads, head_dim\]"),
        ({"k": K[:, :, :4]}, r"q and k: got q of \[4, 8\] and k of \[2, 4\], expected one head_dim, and"),
        ({"k": rows(4, 3, 2)}, r"q and k: got q of \[4, 8\] and k of \[3, 8\], expected one head_dim, and"),
        ({"k": K[:3]}, "k: got queries of positions 0 to 3 and 3 keys, expected the keys of all positions from 0"),
        ({"start": -1}, "k: got queries of positions -1 to 2 and 4 keys"),
        ({"start": 1, "positions": [0, 1, 2, 3]}, "start: got 1, expected 0 with positions; remove one of them"),
        ({"positions": [0.5, 1, 2, 3]}, r"positions: got float64 \[4\], expected 4 whole numbers, one for each query"),
        ({"positions": [1]}, r"positions: got int64 \[1\], expected 4 whole numbers, one for each query"),
        ({"heads": [0, 4]}, "heads: got 4, expected numbers from 0 to 3"),
        ({"heads": "0"}, "heads: got 0, expected numbers from 0 to 3"),
        ({"spans": {"s": (2, 5)}}, r"spans.s: got \(2, 5\), expected \(first, end\) with 0 <= first < end <= 4"),
        ({"spans": {"s": (2, 2)}}, r"spans.s: got \(2, 2\), expected"),
        ({"spans": [(0, 1)]}, r"spans: got \[\(0, 1\)\], expected \(first, end\) by name"),
        ({"spans": {"s": 3}}, "spans.s: got 3, expected"),
        ({"form": AttentionForm(1.0, lacks="a bias")}, "attention weights: got a bias, expected a softmax of q and k"),
        ({"form": FORMS["sinks"]}, "sinks: got none, expected 4 numbers, one for each query head; take them from the"),
        ({"form": FORMS["sinks"], "sinks": [0.5]}, r"sinks: got float64 \[1\], expected 4 numbers, one for each query"),
        ({"sinks": [0.5] * 4}, r"sinks: got \[0.5, 0.5, 0.5, 0.5\], expected none for this layer"),
        ({"form": FORMS["sinks"], "sinks": [[1], [1, 2]]}, r"sinks: got \[\[1\], \[1, 2\]\], expected 4 numbers, one"),
        (
            {"form": FORMS["sinks"], "sinks": [1.0, math.nan, 0, 0]},
            "sinks: got numbers that are not finite in float32,",
        ),
        ({"form": FORMS["sinks"], "sinks": [1e39, 0, 0, 0]}, "sinks: got numbers that are not finite in float32, expe"),
        (
            {"form": FORMS["sinks"], "sinks": torch.ones(4).bool()},
            r"sinks: got bool \[4\], expected 4 numbers, one for",
        ),
        (
            {"form": FORMS["sinks"], "sinks": torch.ones(4, device="meta")},
            "sinks: got tensor.*, expected 4 numbers, one",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {"q": Q, "k": K, "form": FULL} | change
    with pytest.raises(UsageError, match=f"^{message}"):
        capflow.attention_weights(**arguments)


def test_weights_beyond_the_bound_are_refused_before_work(monkeypatch):
    monkeypatch.setattr(limits, "ATTENTION_BYTES_MAX", 500)
    message = r"^attention weights: got 512 bytes for 4 heads, 4 queries and 4 keys, expected at most 500; ask for some"
    with pytest.raises(UsageError, match=message):
        capflow.attention_weights(Q, K, FULL)
    assert capflow.attention_weights(Q, K, FULL, spans={"all": (0, 4)}).shape == (4, 4, 1)
    assert capflow.attention_weights(Q, K, FULL, heads=[0]).shape == (1, 4, 4)


def test_a_model_has_the_forms_of_layers_grouped():
    forms = {0: FORMS["full"], 1: FORMS["window"], 3: FORMS["full"]}
    sites = [Site(layer, hook) for layer in forms for hook in ("q", "k")]
    model = msgspec.structs.replace(make_model(), sites=tuple(sites), attention=grouped_forms(forms))
    assert [(form.window, layers) for form, layers in model.attention] == [(None, (0, 3)), (5, (1,))]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelInfo)
    assert {layer: decoded.attention_of(layer) for layer in range(4)} == {**forms, 2: None}
    assert grouped_forms({}) is msgspec.UNSET
    assert b"attention" not in msgspec.msgpack.encode(make_model())


@pytest.mark.parametrize(
    "field", [{"scale": math.nan}, {"scale": math.inf}, {"window": 0}, {"soft_cap": 0.0}, {"soft_cap": -1.0}]
)
def test_a_form_of_wrong_numbers_is_refused(field):
    with pytest.raises(ValueError, match=r"^expected finite numbers, and a window and a soft cap above 0"):
        AttentionForm(**({"scale": 1.0} | field))


def test_a_form_of_a_layer_without_taps_is_a_protocol_error():
    model = msgspec.structs.replace(make_model(), sites=(Site(0, "q"),), attention=grouped_forms({0: FORMS["full"]}))
    with pytest.raises(RemoteProtocolError, match=r"^hello.model.attention: got \(0,\), expected layers with q and k"):
        HubSession().receive(encoded(Hello("scheduler", "e", "boot", model=model)), 1.0)
