"""Attention weights of a data set: in every layout, after a replay, and what is missing named in one line."""

import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.attention import AttentionForm, grouped_forms
from capflow.capture.model import grouped
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import Want
from capflow.errors import UsageError
from capflow.replay.dataset import entries_of
from capflow_engine.llm.cache import ActivationCache
from tests.kit.frames import make_frame, make_model, row_of
from tests.kit.stored import done, hashed, opened

Q, K, OTHER = Site(1, "q"), Site(1, "k"), Site(0, "q")
SHAPES = {Q: (4, 2), K: (2, 2), OTHER: (4, 2)}
FORM = AttentionForm(0.5, window=3)
MODEL = msgspec.structs.replace(
    make_model(), sites=tuple(sorted(SHAPES)), shapes=grouped(SHAPES), attention=grouped_forms({1: FORM})
)
LENGTH, PROMPT = 7, 4


def store(root, layout, within=None):
    """Store requests `a` and `b`; rows of hooks in `within` are of these positions only."""
    consumer = opened(root, tuple(sorted(SHAPES)), capture="requests", layout=layout)
    consumer.on_session("engine-1", MODEL)
    for seq, (start, count) in enumerate([(0, PROMPT), *((n, 1) for n in range(PROMPT, LENGTH))], 1):
        requests = [(name, PROMPT, start, count) for name in "ab"]
        consumer.on_frame(make_frame(requests, sorted(SHAPES), hidden=8, shapes=SHAPES, within=within or {}, seq=seq))
    for name in "ab":
        count = sum(min((within or {}).get(site.hook, (0, LENGTH))[1], LENGTH) for site in SHAPES)
        assert consumer.on_request_done(done(name, PROMPT, LENGTH, rows=count)).error is None
    consumer.close()
    return capflow.open(root)


def expected_of(name, **more):
    q, k = (
        np.stack([row_of(name, site, p, 2 * heads) for p in range(LENGTH)]).reshape(LENGTH, heads, 2)
        for site, heads in ((Q, 4), (K, 2))
    )
    return capflow.attention_weights(q, k, FORM, **more)


@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
def test_a_capture_has_the_weights_of_its_rows(tmp_path, layout):
    data = store(tmp_path, layout)
    for name in "ab":
        capture = data[name]
        expected = expected_of(name)
        weights = capture.attention(1)
        assert weights.dtype == np.float32
        assert weights.shape == (4, LENGTH, LENGTH)
        assert np.array_equal(weights, expected)
        assert np.array_equal(capture.attention(1, heads=2), expected[2:3])
        assert np.array_equal(capture.attention(1, positions=-1), expected[:, 3:4, :4])
        assert np.array_equal(capture.attention(1, positions=[5, -2, 0]), expected[:, [5, 2, 0], :6])
        assert np.array_equal(capture.attention(1, positions="all_generated"), expected[:, 4:])
        assert np.array_equal(capture.attention(1, positions=range(1, 3)), expected[:, 1:3, :3])
        sums = capture.attention(1, heads=[3, 1], positions={"last": 1}, spans={"rest": (1, 4), "first": (0, 1)})
        assert np.allclose(sums[:, 0], np.stack([expected[[3, 1], 3, 1:4].sum(-1), expected[[3, 1], 3, 0]], -1))


def test_a_cache_has_the_weights_of_each_prompt(tmp_path):
    data = store(tmp_path, "packed")
    wanted = {Q: Want(Positions.named("last_prompt")), K: Want(Positions.ALL)}
    cache = ActivationCache(MODEL, wanted, [data["a"], data["b"]], [])
    # The queries that were asked for, also if the consumer keeps more.
    assert np.array_equal(cache.attention(1, 1), expected_of("b")[:, 3:4, :4])
    assert np.array_equal(cache.attention(1, positions=[6], heads=[0]), expected_of("a")[:1, 6:])
    with pytest.raises(UsageError, match=r"^prompt: got 2, expected a number from 0 to 1$"):
        cache.attention(1, 2)


def test_a_running_capture_has_the_weights_of_its_rows_so_far(tmp_path):
    consumer = opened(tmp_path, tuple(sorted(SHAPES)), capture="requests", layout="per_file", tail_s=0.001)
    consumer.on_session("engine-1", MODEL)
    for seq, (start, count) in enumerate([(0, PROMPT), (PROMPT, 1)], 1):
        consumer.on_frame(make_frame([("a", PROMPT, start, count)], sorted(SHAPES), hidden=8, shapes=SHAPES, seq=seq))
        consumer._tailed_at = -1e9
        consumer.on_idle()
        (running,) = capflow.open(tmp_path).running()
        end = start + count
        assert (running.prompt_length, running.computed_length) == (PROMPT, end)
        assert np.array_equal(running.attention(1), expected_of("a")[:, :end, :end])
        assert np.array_equal(running.attention(1, heads=2, positions=-1), expected_of("a")[2:3, 3:4, :4])
    with pytest.raises(UsageError, match=r"layer 0: got no rows at k:0; q and k are here of layers \[1\], expected"):
        running.attention(0)
    with pytest.raises(
        UsageError, match=r"^positions: got 5, expected from 0 to 4, or from the prompt's end, -1 to -4$"
    ):
        running.attention(1, positions=[5])
    consumer.close()


def test_a_replayed_data_set_has_the_same_weights(tmp_path):
    data = store(tmp_path / "first", "sharded")
    first, *_ = entries_of(data)
    assert first.model.attention_of(1) == FORM
    assert first.model.attention_of(0) is None


def test_rows_that_are_missing_are_named(tmp_path):
    spec = r'; capture \{"hooks": \{"q": \[1\], "k": \[1\]\}, "positions": "all"\}$'
    capture = store(tmp_path / "k", "packed", {"k": (0, 5)})["a"]
    assert np.array_equal(capture.attention(1, positions=[4]), expected_of("a")[:, 4:5, :5])
    with pytest.raises(UsageError, match=r"a: attention of layer 1: got no rows at k of the positions 5..6, .*" + spec):
        capture.attention(1)
    capture = store(tmp_path / "q", "packed", {"q": (0, 5)})["a"]
    with pytest.raises(UsageError, match=r"got no rows at q of the positions 6, expected positions that were.*" + spec):
        capture.attention(1, positions=[4, 6])
    with pytest.raises(UsageError, match=r"layer 0: got no rows at k:0; q and k are here of layers \[1\], expected"):
        capture.attention(0)
    with pytest.raises(
        UsageError, match=r"^positions: got 7, expected from 0 to 6, or from the prompt's end, -1 to -4$"
    ):
        capture.attention(1, positions=[0, 7])
    with pytest.raises(UsageError, match=r"^positions: got middle, expected"):
        capture.attention(1, positions="middle")
    with pytest.raises(UsageError, match=r"^layer: got q:1, expected the number of a layer, such as 5$"):
        capture.attention("q:1")
    with pytest.raises(UsageError, match=r"attention of layer 1: got no positions, expected one at least$"):
        capture.attention(1, positions=[])


def test_a_data_set_without_the_form_says_so(tmp_path):
    store(tmp_path, "packed")
    path = tmp_path / "a" / "request.json"
    text = path.read_bytes()
    part = b',"attention":' + msgspec.json.encode(FORM)
    assert part in text
    path.write_bytes(hashed(text.replace(part, b"")))
    with pytest.raises(UsageError, match="a data set that does not say the scale and the window; capture it again"):
        capflow.open(tmp_path)["a"].attention(1)
