"""The file of an experiment: each wrong value is refused with its line, and with what to write."""

import json
import shutil

import msgspec
import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import save_vector
from capflow_models.experiment.arms import settings_of
from capflow_models.experiment.file import (
    ARM_KINDS,
    METRICS,
    ArmOptions,
    Experiment,
    GateOptions,
    General,
    JudgeCommand,
    ProbeSource,
    PromptSource,
    VectorSource,
)
from capflow_models.experiment.places import line_of, lines_of
from capflow_models.experiment.program import ExperimentJob, run
from capflow_models.experiment.prompts import read_prompts
from tests.kit.sources import ROOT

GOOD = """\
model = "demo"
seeds = [0, 1]

[prompts]
path = "prompts.jsonl"

[probe]
fit = "prompts.jsonl"
layer = 2

[vector]
fit = "pairs.jsonl"

[sweep]
layer = [3]
scale = [1.0, 2.0]

[arms.baseline]

[arms.always_on]

[arms.gated_sync]
threshold = [0.0, 1.0, 2.0]
"""


@pytest.fixture
def write(tmp_path):
    lines = [json.dumps({"prompt": "w5", "label": label}) for label in ("target", "benign")] * 2
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "pairs.jsonl").write_text((json.dumps({"positive": "w5", "negative": "w6"}) + "\n") * 2)

    def write(text):
        path = tmp_path / "experiment.toml"
        path.write_text(text)
        return path

    return write


def test_an_arm_has_every_combination_of_the_axes_that_matter_for_it(write):
    settings = settings_of(Experiment.read(write(GOOD)), 0.5)
    points = [(setting.arm, setting.threshold, setting.scale) for setting in settings]
    assert points[:3] == [("baseline", None, None), ("always_on", None, 1.0), ("always_on", None, 2.0)]
    assert len([point for point in points if point[0] == "gated_sync"]) == 3 * 2
    assert len({setting.name for setting in settings}) == len(settings)


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("[arms.gated_sync]", "[arms.gatd_sync]", 22, "got gatd_sync, expected one of baseline, always_on"),
        ("[arms.always_on]", '[arms.mine]\nkind = "allways"', 21, "got allways, expected one of baseline"),
        ("seeds = [0, 1]", 'metrics = ["kl", "perplexty"]', 2, "got perplexty, expected one of gate_rate"),
        ("seeds = [0, 1]", 'metrics = ["judge"]', 2, "write a table [judge]"),
        ("seeds = [0, 1]", 'effect = "held_out"', 2, "write a table [held_out]"),
        ("seeds = [0, 1]", "sedes = [0, 1]", 2, "got an unknown key, expected one of model, seeds"),
        ("seeds = [0, 1]", 'seeds = "0"', 2, "got 0, expected array"),
        ("seeds = [0, 1]", "seeds = [1, 1]", 2, "got [1, 1], expected each value once"),
        ("seeds = [0, 1]", "max_tokens = 0", 2, "got 0, expected int >= 1"),
        ('path = "prompts.jsonl"', 'path = "promts.jsonl"', 5, "got promts.jsonl, expected an existing file"),
        ('path = "prompts.jsonl"', 'pth = "prompts.jsonl"', 5, "got an unknown key, expected one of path"),
        ('path = "prompts.jsonl"', "", 4, "write path = …"),
        ("layer = 2", "", 7, "expected the layer of the probe; write layer = 9"),
        ("layer = 2", 'file = "prompts.jsonl"', 7, "got file and fit, expected one of file, fit"),
        ('fit = "pairs.jsonl"', 'fit = "missing.jsonl"', 12, "got missing.jsonl, expected an existing file"),
        ("layer = [3]", "", 20, "write layer = [12] here or in [sweep]"),
        ("scale = [1.0, 2.0]", "scale = [1.0, nan]", 16, "expected finite numbers"),
        ("scale = [1.0, 2.0]", "scale = [1.0, 1.0]", 16, "expected each value once"),
        ("scale = [1.0, 2.0]", "sharpness = [-1.0]", 16, "got -1.0, expected float > 0"),
        ("[arms.baseline]", "[arms.shadow]", 1, "write [arms.baseline]"),
        ("[arms.always_on]", "[arms.prompt_only]", 20, "expected a text with {prompt} in it"),
        ("threshold = [0.0, 1.0, 2.0]", 'at = "all"', 23, "expected generated, as it acts between steps"),
        ("[arms.baseline]", "[gate]\nlatched = true\n[arms.baseline]", 19, "expected one of positions, latch"),
        (
            "[arms.baseline]",
            "[arms.baseline]\nscale = [1.0]",
            19,
            "got [1.0], expected no scale; the axes of baseline: none",
        ),
        ("[arms.always_on]", "[arms.always_on]\nthreshold = [1.0]", 21, "the axes of always_on: layer, scale"),
        ("[arms.always_on]", "[arms.always_on]\nsharpness = [1.0]", 21, "expected no sharpness"),
        ("[arms.always_on]", "[arms.always_on]\nvector_seed = 3", 21, "got 3, expected none, as its kind is always_on"),
        ("[arms.always_on]", '[arms.shadow]\nat = "all"', 21, "got all, expected none, as its kind is shadow"),
        (
            "[arms.always_on]",
            "[arms.in_graph]\n[gate]\nlatch = false\npositions = 'prompt'",
            22,
            "in_graph would never act",
        ),
        ("seeds = [0, 1]", 'harm = "distinct_1"', 2, "expected one of kl, perplexity, duty, of which more is worse"),
        ("seeds = [0, 1]", 'harm = "tokens_per_s"', 2, "expected one of kl"),
        (
            'fit = "pairs.jsonl"',
            'fit = "pairs.jsonl"\nhook = "post_blok"',
            13,
            "got post_blok, expected one of pre_attn",
        ),
        ("layer = 2", "layer = 2\nthreshold = nan", 10, "got nan, expected a finite number"),
        (
            'path = "prompts.jsonl"',
            'path = "prompts.jsonl"\nbenign = ["target"]',
            6,
            "expected other labels than those of",
        ),
        ("[arms.baseline]", "[engine]\nconsumers = []\n[arms.baseline]", 19, "got consumers, expected to be left out"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line_and_what_to_write(write, before, after, line, words):
    assert before in GOOD
    path = write(GOOD.replace(before, after))
    with pytest.raises(UsageError) as e:
        Experiment.read(path)
    assert str(e.value).startswith(f"{path}, line {line}: ")
    assert words in str(e.value)


@pytest.mark.parametrize(
    ("layer", "words"), [(1, "expected a layer after the probe's site, post_block:2"), (99, "0 .. 3")]
)
def test_a_layer_that_cannot_be_is_refused_before_an_engine_starts(write, tiny, layer, words):
    text = GOOD.replace('"demo"', json.dumps(tiny)).replace("gated_sync", "in_graph")
    path = write(text.replace("layer = [3]", f"layer = [{layer}]"))
    with pytest.raises(UsageError) as e:
        run(ExperimentJob(str(path), dry_run=layer == 1))
    assert str(e.value).startswith(f"{path}, line 15: sweep.layer: got {layer}, expected ")
    assert words in str(e.value)


def test_a_directory_that_is_a_file_and_calibration_without_a_dry_run_are_refused(write, tmp_path):
    path = write(GOOD)
    bare = path.rename(tmp_path / "experiment")
    with pytest.raises(UsageError, match=r"--out: got .*experiment, a file, expected a directory; write --out DIR"):
        run(ExperimentJob(str(bare)))
    with pytest.raises(UsageError, match="--calibrate: got no --dry-run"):
        run(ExperimentJob(str(bare), out=str(tmp_path / "out"), calibrate=True))


def test_a_byte_order_mark_begins_no_key(tmp_path, write):
    path = write(GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Experiment.read(path).general.model == "demo"


def test_prompts_without_ids_from_two_splits_of_a_data_set_have_different_ids(tmp_path, write):
    import datasets

    data = datasets.Dataset.from_list([{"prompt": "a", "label": "target"}, {"prompt": "b", "label": "benign"}])
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "ds")
    one = '[[prompts]]\npath = "ds"\nsplit = "{}"\n'
    text = GOOD.replace('[prompts]\npath = "prompts.jsonl"\n', one.format("train") + one.format("test"))
    prompts = read_prompts(Experiment.read(write(text)))
    assert [prompt.id for prompt in prompts] == ["ds-train-0", "ds-train-1", "ds-test-0", "ds-test-1"]
    twice = one.format("train") + 'target = ["benign"]\nbenign = ["no"]\n' + one.format("train")
    prompts = read_prompts(Experiment.read(write(GOOD.replace('[prompts]\npath = "prompts.jsonl"\n', twice))))
    assert [prompt.id for prompt in prompts] == ["ds-train-0-1", "ds-train-1-0", "ds-train-1-1"]
    fitted = write(GOOD.replace('fit = "prompts.jsonl"', 'fit = "ds"\nsplit = "test"'))
    assert Experiment.read(fitted).probe.split == "test"


def test_labels_of_which_none_is_a_target_are_refused_with_those_of_the_file(write):
    experiment = Experiment.read(write(GOOD.replace("[prompts]", '[prompts]\ntarget = ["code"]')))
    with pytest.raises(UsageError, match=r'no target prompts; the labels found: "target", "benign".*write target = '):
        read_prompts(experiment)


def test_a_file_of_another_kind_is_refused_before_an_engine_starts(write, tmp_path):
    save_vector(tmp_path / "vector.safetensors", Site(2, "post_block"), np.ones(8))
    path = write(GOOD.replace('fit = "prompts.jsonl"\nlayer = 2', 'file = "vector.safetensors"'))
    with pytest.raises(UsageError, match=r"vector\.safetensors.*weight"):
        run(ExperimentJob(str(path), dry_run=True))


def test_the_page_shows_a_file_that_can_be_read_and_names_every_arm_metric_and_key(tmp_path):
    page = (ROOT / "docs" / "experiments.md").read_text()
    shown = page.partition("```toml\n")[2].partition("```")[0]
    shutil.copytree(ROOT / "examples" / "steering-experiment", tmp_path / "examples" / "here")
    shutil.copy(ROOT / "examples" / "glad_pairs.jsonl", tmp_path / "examples")
    path = tmp_path / "examples" / "here" / "shown.toml"
    path.write_text(shown)
    assert set(Experiment.read(path).arms) == {"baseline", "always_on", "in_graph"}
    Experiment.read(ROOT / "examples" / "steering-experiment" / "experiment.toml")
    kinds = (General, PromptSource, ProbeSource, VectorSource, GateOptions, JudgeCommand, ArmOptions)
    keys = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    assert [name for name in (*ARM_KINDS, *METRICS, *keys) if f"`{name}`" not in page] == []


def test_a_file_that_is_no_toml_is_refused_with_its_line(write):
    with pytest.raises(UsageError, match="at line 3, column 2"):
        Experiment.read(write('model = "demo"\nseeds = [0,\n[x'))


def test_other_line_separators_count_as_no_lines():
    assert lines_of("a = '\u2028'\nb = 1\n")["b",] == 2


def test_lines_are_those_of_keys_tables_and_arrays_of_tables():
    text = 'a = 1\n[[b]]\nc = """\nd = 2\n"""\n[[b]]\n"e f" = 3\ng.h = 4\n[x.y] # no\nz = "[q]"\n'
    lines = lines_of(text)
    assert lines["a",] == 1
    assert lines["b", 0, "c"] == 3
    assert ("b", 0, "d") not in lines
    assert lines["b", 1, "e f"] == 7
    assert lines["b", 1, "g", "h"] == 8
    assert lines["x", "y", "z"] == 10
    assert line_of(lines, ("x", "y", "missing")) == 9
