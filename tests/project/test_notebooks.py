"""The notebooks of examples/: their form, and their code, run on the demo model."""

import json

import pytest

from tests.kit.notebooks import NOTEBOOKS, cells, run
from tests.kit.sources import ROOT

SHOWS = {
    "capture_and_probe": ["<td>post_block</td>", "layer 17  ", "glad.safetensors: ", "token_id"],
    "steer": ["<td>2 x length ", "'sad': ", "plain  ", "glad  "],
    "patch_sweep": ["SweepResult: 1 pair", "recovery"],
    "sae": ["post_block:9: 256 features, ", "of the variance is not explained", "ablate in words: ", "ablate mean "],
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_is_documented(path):
    page = json.loads(path.read_text(encoding="utf-8"))
    assert (page["nbformat"], page["nbformat_minor"]) == (4, 5)
    code = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)
    assert len({cell["id"] for cell in page["cells"]}) == len(page["cells"])
    assert all(len(line) <= 120 for cell in page["cells"] for line in "".join(cell["source"]).splitlines())
    assert f"`{path.name}`" in (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    for source in cells(path):
        compile(source, path.name, "exec")


def test_each_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS} == SHOWS.keys()


def _marked(path):
    """Return a notebook as a parameter; those that train or sweep take minutes."""
    return pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in ("sae", "patch_sweep") else [])


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("path", [_marked(path) for path in NOTEBOOKS])
def test_a_notebook_runs(path):
    output = run(path)
    for text in SHOWS[path.stem]:
        assert text in output
