"""How objects look in a notebook, what data frames they give, and the bar there."""

import sys
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest

import capflow
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.text.notebook import html_table
from capflow_models import AblationSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec
from capflow_models.jobs.bar import notebook_bar
from tests.kit.captured import LAYOUTS, REQUESTS, SITES, write

EVIL = "<script>alert('x')</script>&\"<b>"


class Page(HTMLParser):
    """The tags and the cells of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.cells = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.tags.add(tag)
        self.cells.append("")

    def handle_data(self, data):
        self.cells[-1] += data


def shown(value):
    page = Page(value if isinstance(value, str) else value._repr_html_())
    assert page.tags <= {"table", "caption", "tr", "th", "td"}
    return page.cells


def test_every_text_is_escaped(tmp_path):
    assert shown(html_table([EVIL], [[EVIL]], EVIL)).count(EVIL) == 3
    root = write(tmp_path / EVIL.replace("/", "_"), {EVIL: (2, 3)})
    data = capflow.open(root)
    assert EVIL in shown(data)
    assert any(EVIL.split("'", maxsplit=1)[0] in cell for cell in shown(data[EVIL]))
    assert any(EVIL[:8] in cell for cell in shown(CaptureResult("error", EVIL)))
    assert any(EVIL[:8] in cell for cell in shown(CaptureSpec({"post_block": "all"}, tag=EVIL)))


def test_a_data_set_shows_its_first_captures(tmp_path):
    data = capflow.open(write(tmp_path / "rows", {f"r{n:02}": (2, 4) for n in range(12)}))
    cells = shown(data)
    assert f"<data set {str(tmp_path / 'rows')!r}: 12 captures>" in cells
    assert [cell for cell in cells if cell.startswith("r0")] == [f"r{n:02}" for n in range(8)]
    assert shown(data["r03"])[-3:] == ["post_block:3", "4", "8"]


def test_a_specification_shows_what_it_does():
    spec = SteeringSpec(
        {
            9: LayerSteeringSpec(np.full(4, 3.0), 0.5, ProjectionCapSpec(np.ones(4), cap_above=1.5)),
            Site(12, "pre_attn"): LayerSteeringSpec(np.ones(4), 0.1, None, AblationSpec(np.ones(4)), relative=True),
        }
    )
    assert shown(spec)[-10:] == [
        "", "post_block:9", "0.5 x length 6", "any to 1.5", "", "", "pre_attn:12", "0.1 x the stream's norm", "", "x 0",
    ]  # fmt: skip
    assert "SteeringSpec: nothing is steered" in shown(SteeringSpec())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_is_a_table_of_its_rows(tmp_path, layout):
    data = capflow.open(write(tmp_path / "rows", layout=layout))
    table = data.to_arrow()
    assert table.num_rows == sum(computed for _, computed in REQUESTS.values()) * len(SITES)
    frame = data.to_polars()
    for request in REQUESTS:
        for site in SITES:
            part = frame.filter((pl.col("request") == request) & (pl.col("layer") == site.layer))
            part = part.filter(pl.col("hook") == site.hook)
            rows = data[request][site]
            assert np.array_equal(np.stack(part["row"].to_list()), rows.rows.astype(np.float32))
            assert part["position"].to_list() == rows.positions.tolist()
            assert part["token_id"].to_list() == rows.token_ids.tolist()
    alone = data["a"].to_pandas()
    assert list(alone.columns) == ["request", "layer", "hook", "position", "token_id", "row"]
    assert len(alone) == 9 * len(SITES)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    data = capflow.open(write(tmp_path / "rows"))
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match=r"^to_polars: missing package polars; pip install polars$"):
        data.to_polars()


def test_a_bar_is_drawn_in_a_notebook_only(monkeypatch, capsys):
    with notebook_bar("runs") as progress:
        assert progress is None

    class ZMQInteractiveShell:
        pass

    class IPython:
        get_ipython = staticmethod(ZMQInteractiveShell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    monkeypatch.setitem(sys.modules, "tqdm.auto", __import__("tqdm.std"))
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    with notebook_bar("runs") as progress:
        progress(3, 8)
        progress(8, 8)
    assert "runs: 100%" in capsys.readouterr().err
