"""The experts of a data set's tokens: in every layout, after a replay, and what is missing named in one line."""

import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.attention import grouped_forms
from capflow.capture.model import grouped
from capflow.capture.positions import Positions
from capflow.capture.router import RouterForm
from capflow.capture.site import Site
from capflow.capture.spec import Want
from capflow.errors import UsageError
from capflow.replay.dataset import entries_of
from capflow_engine.llm.cache import ActivationCache
from tests.kit.frames import make_frame, make_model, row_of
from tests.kit.stored import done, hashed, opened

PLAIN, BIASED, STREAM = Site(0, "router"), Site(1, "router"), Site(1, "post_block")
SITES = (PLAIN, STREAM, BIASED)
SHAPES = {PLAIN: (6,), BIASED: (4,)}
FORMS = {0: RouterForm(2, renormalised=True, n_group=3, topk_group=2), 1: RouterForm(3, "sigmoid", biased=True)}
BIAS = [0.5, -0.5, 0.25, 0.0]
MODEL = msgspec.structs.replace(make_model(), sites=SITES, shapes=grouped(SHAPES), router=grouped_forms(FORMS))
LENGTH, PROMPT, ROUTED = 7, 4, 6


@pytest.fixture(params=["per_file", "packed", "sharded"])
def data(request, tmp_path):
    """A data set of requests `a` and `b`; the last token has no rows at `router`."""
    consumer = opened(tmp_path / "rows", SITES, capture="requests", layout=request.param)
    consumer.on_session("engine-1", MODEL)
    for seq, (start, count) in enumerate([(0, PROMPT), *((n, 1) for n in range(PROMPT, LENGTH))], 1):
        requests = [(name, PROMPT, start, count) for name in "ab"]
        consumer.on_frame(make_frame(requests, SITES, hidden=8, shapes=SHAPES, within={"router": (0, ROUTED)}, seq=seq))
    for name in "ab":
        assert consumer.on_request_done(done(name, PROMPT, LENGTH, rows=LENGTH + 2 * ROUTED)).error is None
    consumer.close()
    return capflow.open(tmp_path / "rows")


def expected_of(name, layer, positions, **bias):
    (width,) = SHAPES[site := Site(layer, "router")]
    logits = np.stack([row_of(name, site, position, width) for position in positions])
    return capflow.chosen_experts(logits, FORMS[layer], **bias)


def same(got, expected):
    return all(np.array_equal(*pair) for pair in zip(got, expected, strict=True))


def test_a_capture_has_the_experts_of_its_tokens(data):
    for name in "ab":
        ids, weights = data[name].experts(0)
        assert ids.shape == (ROUTED, 2)
        assert weights.dtype == np.float32
        assert same((ids, weights), expected_of(name, 0, range(ROUTED)))
        assert same(data[name].experts(0, positions=[5, -1]), expected_of(name, 0, [5, 3]))
        assert same(data[name].experts(1, bias=BIAS), expected_of(name, 1, range(ROUTED), bias=BIAS))
    wanted = {PLAIN: Want(Positions.named("last_prompt")), BIASED: Want(Positions.ALL)}
    cache = ActivationCache(MODEL, wanted, [data["a"], data["b"]], [])
    # The tokens that were asked for, also if the consumer keeps more.
    assert same(cache.experts(0, 1), expected_of("b", 0, [PROMPT - 1]))
    assert same(cache.experts(1, positions=[2], bias=BIAS), expected_of("a", 1, [2], bias=BIAS))
    replayed, *_ = entries_of(data)
    assert {layer: replayed.model.router_of(layer) for layer in range(2)} == FORMS


@pytest.mark.parametrize("data", ["packed"], indirect=True)
def test_what_is_missing_is_named(data, tmp_path):
    spec = r'; capture \{"hooks": \{"router": \[%d\]\}, "positions": "all"\}$'
    with pytest.raises(
        UsageError, match=r"a: experts of layer 1: got no rows at router of the positions 6, .*" + spec % 1
    ):
        data["a"].experts(1, positions=[0, 6], bias=BIAS)
    with pytest.raises(
        UsageError, match=r"got no rows at router:2; router is here of layers \[0, 1\], exp.*" + spec % 2
    ):
        data["a"].experts(2)
    with pytest.raises(UsageError, match=r"^bias: got none, expected 4 numbers, one for each expert; take"):
        data["a"].experts(1)
    with pytest.raises(UsageError, match=r"^layer: got router:1, expected the number of a layer, such as 5$"):
        data["a"].experts("router:1")
    path = tmp_path / "rows" / "a" / "request.json"
    part = b',"router":' + msgspec.json.encode(FORMS[0])
    assert part in path.read_bytes()
    path.write_bytes(hashed(path.read_bytes().replace(part, b"")))
    with pytest.raises(UsageError, match="a data set that does not say how they are chosen; capture it again, or give"):
        capflow.open(tmp_path / "rows")["a"].experts(0)


def test_a_running_capture_has_the_experts_of_its_rows_so_far(tmp_path):
    consumer = opened(tmp_path, SITES, capture="requests", layout="per_file", tail_s=0.001)
    consumer.on_session("engine-1", MODEL)
    consumer.on_frame(make_frame([("a", PROMPT, 0, PROMPT)], SITES, hidden=8, shapes=SHAPES))
    consumer._tailed_at = -1e9
    consumer.on_idle()
    (running,) = capflow.open(tmp_path).running()
    assert same(running.experts(0), expected_of("a", 0, range(PROMPT)))
    assert same(running.experts(1, positions=-1, bias=BIAS), expected_of("a", 1, [PROMPT - 1], bias=BIAS))
    consumer.close()
