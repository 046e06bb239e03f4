"""The cache's arrays of rows with a shape of their own, read from a data set."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import capflow
from capflow.capture.positions import Positions
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import Want
from capflow.errors import CapflowError, UsageError
from capflow_engine.llm.cache import ActivationCache, _captures
from tests.kit.frames import row_of
from tests.kit.shaped import SITES, shaped_model, store, width_of

HEADS = Site(1, "heads")


@pytest.fixture
def cache(tmp_path):
    store(tmp_path, {"a": 6, "b": 5, "c": 4})
    wanted = dict.fromkeys(SITES, Want(Positions.ALL))
    data = capflow.open(tmp_path)
    return ActivationCache(shaped_model(), wanted, [data[name] for name in "abc"], [])


def test_rows_have_the_shape_of_their_site(cache):
    heads = cache["heads:1"]
    assert heads.shape == (3, 3, 4, 3)
    for number, name in enumerate("abc"):
        expected = np.stack([row_of(name, HEADS, p, 12) for p in (1, 2, 3)])
        assert np.array_equal(heads[number], expected.reshape(3, 4, 3))
    router = cache["router:2"]  # the shortest prompt has one position, the longest three
    assert router.shape == (3, 3, 5)
    assert np.array_equal(cache["router"], router, equal_nan=True)  # the only layer with rows there
    assert np.isnan(router[2, 1:]).all()
    assert cache["post_block:0"].shape == (3, 6, 8)
    assert cache.torch("heads:1").shape == (3, 3, 4, 3)


def test_a_prompt_without_rows_is_filled_up(tmp_path):
    store(tmp_path, {"a": 5, "b": 4}, (Site(2, "router"), Site(0, "post_block")))
    data = capflow.open(tmp_path)
    captures = [data["a"], data["b"]]
    captures[1]._entries.pop(Site(2, "router"))
    made = ActivationCache(shaped_model(), {Site(2, "router"): Want(Positions.ALL)}, captures, [])
    assert made["router:2"].shape == (2, 2, 5)
    assert np.isnan(made["router:2"][1]).all()


def test_layers_of_different_shapes_are_not_stacked(cache):
    with pytest.raises(UsageError) as caught:
        cache.stack("heads")
    assert str(caught.value).startswith(
        "hook: got rows of [2, 6] at heads:0 and [4, 3] at heads:1 and [4, 6] at heads:2"
    )
    assert cache.stack("post_block").shape == (2, 3, 6, 8)
    assert "3 x 3 x 4 x 3" not in cache._repr_html_()
    assert "3 x 3 x 2 x 6" in cache._repr_html_()


def test_a_table_has_rows_of_every_width(cache):
    table = cache.to_arrow()
    lines = [
        line for line in table.to_pylist() if (line["hook"], line["layer"]) == ("heads", 1) and line["prompt"] == 1
    ]
    assert [line["position"] for line in lines] == [1, 2, 3]
    assert np.array_equal(np.array(lines[2]["row"], np.float32), row_of("b", HEADS, 3, 12))
    assert {len(line["row"]) for line in table.to_pylist()} == {width_of(site) for site in SITES}


def test_rows_that_were_lost_are_named():
    output = SimpleNamespace(capture_results={"filesystem": CaptureResult("partial_error", "18 rows lost: queue_full")})
    with pytest.raises(CapflowError) as caught:
        _captures(["r1"], [output])
    assert str(caught.value) == "cache: got 18 rows lost: queue_full, expected every row of request r1"
