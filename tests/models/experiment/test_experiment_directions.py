"""Directions of experiments: fitted with a model in memory, kept, and refused if a later file would fit others."""

import contextlib
import json

import msgspec
import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.plugins.configure import parse
from capflow.probes.probe import Probe, load_vector
from capflow_models.experiment.arms import check_layers, check_room, gates_of, settings_of, sites_of
from capflow_models.experiment.directions import check_files, checked_fits, known_threshold, resolve
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import Fitter, fit_probe, held_out
from capflow_models.experiment.program import ExperimentJob, run
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.results.manifest import hash_of, manifest_of
from capflow_models.vectors.file import save_vectors
from tests.kit.autoencoders import saelens, weights

GOOD = """\
model = "demo"
max_tokens = 8

[prompts]
path = "texts.jsonl"

[probe]
fit = "texts.jsonl"
layer = 1
method = "mean"

[gate]
positions = "last_prompt"

[vector]
fit = "pairs.jsonl"

[sweep]
layer = [2]

[arms.baseline]

[arms.shadow]

[arms.gated_sync]

[engine]
dtype = "float32"
"""
WIDTH = 6


class MemoryModel:
    """Rows from the texts: a target's last row has a 1 in its first place, and the first row of a text is large."""

    def rows(self, texts, site):
        return [self._text(text, site) for text in texts]

    def last_rows(self, prompts, sites):
        return {site: np.stack([self._text(prompt, site)[-1] for prompt in prompts]) for site in sites}

    def _text(self, text, site):
        words = text.split()
        rng = np.random.default_rng([site.layer, *text.encode()])
        rows = 0.01 * rng.normal(size=(len(words), WIDTH)).astype(np.float32)
        rows[-1, 0] = 1.0 if words[-1] == "yes" else -1.0
        if len(words) > 1:
            rows[0, 0] = 100.0
        return rows


@pytest.fixture
def write(tmp_path):
    texts = [(f"a{n} b{n} {'yes' if n % 2 else 'no'}", "target" if n % 2 else "benign") for n in range(12)]
    lines = [json.dumps({"prompt": text, "label": label}) for text, label in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    pairs = [{"positive": f"c{n} yes", "negative": f"c{n} no"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    def write(*changes):
        text = GOOD
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path / "experiment.toml"
        path.write_text(text)
        return Experiment.read(path)

    return write


def resolved(experiment, out, *, starts=True):
    """Return what `resolve` returns; `starts` says whether a model may start."""

    @contextlib.contextmanager
    def start():
        assert starts, "nothing is to be fitted"
        model = MemoryModel()
        yield Fitter(model, model.rows)

    layers = sorted({setting.layer for setting in settings_of(experiment, 0.0) if setting.layer is not None})
    return resolve(experiment, layers, out, start)


def test_a_shadow_gate_has_no_vector_whatever_vectors_there_are(write, tmp_path):
    save_vectors(tmp_path / "v.safetensors", {layer: np.ones(WIDTH) for layer in range(4)})
    experiment = write(('fit = "pairs.jsonl"', 'file = "v.safetensors"'))
    directions, files, _ = resolved(experiment, tmp_path / "out")
    settings = settings_of(experiment, 0.5)
    shadow, sync = (parse(text)[1] for text in gates_of(settings, experiment, directions, files))
    assert "vector" not in shadow
    assert load_vector(sync["vector"]).site == Site(2, "post_block")
    assert set(sites_of(settings, directions)) == {"post_block:1", "post_block:2"}


def of_features(features, more="", path="mood@post_block:2"):
    return 'fit = "pairs.jsonl"', f'sae = "{path}"\nfeatures = {features}{more}'


def test_features_are_the_vector_that_a_request_adds(write, tmp_path):
    saelens(tmp_path / "mood", weights(width=WIDTH))
    experiment = write(of_features("{3 = 2.0, 5 = {add = -1.5}}"))
    assert check_files(experiment, [2]) == Site(1, "post_block")
    directions, files, _ = resolved(experiment, tmp_path / "out")
    rows = weights(width=WIDTH)["W_dec"].astype(np.float64)
    np.testing.assert_allclose(directions.vectors[2], 2 * rows[3] - 1.5 * rows[5], rtol=1e-6)
    assert directions.vectors[2].dtype == np.float32
    np.testing.assert_array_equal(load_vector(files[2]).array(np.float32), directions.vectors[2])
    manifest = manifest_of(experiment, tmp_path / "out", [], 1.0)
    assert manifest.files["mood"] == hash_of(tmp_path / "mood")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_features("{3 = {set = 0}}"), "vector.features: expected features to add; features.features.3: got set"),
        (
            of_features("{99 = 1.0}"),
            "vector.features: expected features to add; features.features.99: got 99, expected",
        ),
        (of_features("{1 = 1.0}", path="gone"), "vector.sae: expected an autoencoder; "),
        (
            of_features("{1 = 1.0}", path="mood@post_block:0"),
            "vector.sae: got vectors at post_block:0, expected vectors",
        ),
        (
            of_features("{1 = 1.0}", '\nhook = "mlp_out"'),
            "vector.sae: got vectors at post_block:2, expected vectors of",
        ),
        (of_features("{}"), "vector: got none, expected features beside sae"),
        (of_features("{1 = 1.0}", '\nfit = "pairs.jsonl"'), "vector: got fit and sae, expected one of file, fit, sae"),
        (('fit = "pairs.jsonl"', 'fit = "pairs.jsonl"\nfeatures = {1 = 1.0}'), "vector: got features, expected none"),
    ],
)
def test_features_that_cannot_be_added_are_refused_with_their_line(write, tmp_path, change, words):
    saelens(tmp_path / "mood", weights(width=WIDTH))
    with pytest.raises(UsageError) as caught:
        check_files(write(change), [2])
    assert "experiment.toml, line " in str(caught.value)
    assert words in str(caught.value)


def test_a_vector_is_fitted_only_for_arms_with_a_layer(write, tmp_path):
    experiment = write(("[arms.gated_sync]\n", ""))
    directions, files, fits = resolved(experiment, tmp_path / "out")
    assert [fit.name for fit in fits] == ["probe"]
    assert (dict(directions.vectors), files) == ({}, {})
    assert len(gates_of(settings_of(experiment, 0.5), experiment, directions, files)) == 1
    plain = write(
        ("[arms.gated_sync]\n", ""), ("[arms.shadow]\n", ""), (GOOD[GOOD.index("[probe]") : GOOD.index("[vector]")], "")
    )
    assert resolved(plain, tmp_path / "other", starts=False)[2] == []


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("layer = 1", "layer = 0", 9, "probe.layer: got 0, expected 1, with which probe was fitted in"),
        ('method = "mean"', 'method = "logistic"', 10, "probe.method: got logistic, expected mean"),
        ('method = "mean"', 'tokens = "all"', 7, "probe.method: got logistic, expected mean"),
        ("layer = 1", "seed = 3\nlayer = 1", 9, "probe.seed: got 3, expected 0"),
        ("layer = 1", 'positive = ["benign"]\nlayer = 1', 9, "probe.positive: got benign, expected target"),
        ('positions = "last_prompt"', 'positions = "all"', 13, "gate.positions: got all, expected last_prompt"),
        ('fit = "pairs.jsonl"', 'fit = "pairs.jsonl"\nmethod = "pca"', 17, "vector.method: got pca, expected mean"),
        ('fit = "pairs.jsonl"', 'fit = "pairs.jsonl"\nhook = "pre_attn"', 17, "vector.hook: got pre_attn, expected"),
        ('model = "demo"', 'model = "other"', 1, "model: got other, expected demo"),
        ('"float32"', '"float16"', 27, "engine: got dtype = 'float16', expected dtype = 'float32'"),
    ],
)
def test_a_direction_that_was_fitted_otherwise_is_refused_with_the_key(write, tmp_path, before, after, line, words):
    resolved(write(), tmp_path / "out")
    with pytest.raises(UsageError) as e:
        resolved(write((before, after)), tmp_path / "out")
    assert f"experiment.toml, line {line}: {words}" in str(e.value)
    assert str(e.value).endswith("choose another directory with --out, or remove this one")


def test_other_texts_in_the_file_of_a_fit_are_refused(write, tmp_path):
    experiment = write()
    resolved(experiment, tmp_path / "out")
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"prompt": "x yes", "label": "target"}\n')
    with pytest.raises(UsageError, match=r"line 8: probe\.fit: got a file with another content"):
        checked_fits(experiment, [2], tmp_path / "out")


def test_what_is_missing_is_fitted_and_the_rest_is_kept(write, tmp_path):
    out = tmp_path / "out"
    resolved(write(), out)
    kept = {path.name: path.read_bytes() for path in out.glob("*.safetensors") if not path.name.startswith("gate")}
    more = write(
        ("layer = [2]", "layer = [2, 3]"), ("[sweep]", '[held_out]\nfit = "texts.jsonl"\nlayer = 3\n\n[sweep]')
    )
    directions, files, fits = resolved(more, out)
    assert [fit.site for fit in fits] == ["post_block:1", "post_block:3", "post_block:2", "post_block:3"]
    assert set(directions.vectors) == set(files) == {2, 3}
    assert {name: (out / name).read_bytes() for name in kept} == kept
    assert resolved(more, out, starts=False)[2] == fits
    assert [fit.site for fit in resolved(write(), out, starts=False)[2]] == ["post_block:1", "post_block:2"]


def test_a_threshold_of_the_file_replaces_that_of_a_kept_fit(write, tmp_path):
    out = tmp_path / "out"
    assert known_threshold(write(), out) is None
    own = resolved(write(), out)[0].threshold
    assert known_threshold(write(), out) == own
    changed = write(("layer = 1", "threshold = 0.25\nlayer = 1"))
    directions, _, fits = resolved(changed, out, starts=False)
    assert directions.threshold == fits[0].threshold == known_threshold(changed, out) == 0.25
    assert resolved(write(), out, starts=False)[0].threshold == own


def test_the_threshold_of_a_gate_is_for_the_positions_that_the_gate_scores(write, tmp_path):
    """The first row of each text scores far above the last one, on which the probe is fitted."""
    model = MemoryModel()
    fits = {}
    for positions in ("last_prompt", "all", "generated"):
        experiment = write(('"last_prompt"', f'"{positions}"'))
        fits[positions] = fit_probe(experiment, "probe", experiment.probe, Fitter(model, model.rows), tmp_path)
    assert fits["last_prompt"].auc == fits["generated"].auc == 1.0
    assert abs(fits["last_prompt"].threshold) < 0.1
    # With all positions the maxima are those of the first row, which tell nothing.
    assert fits["all"].threshold > 50
    assert fits["all"].auc < 1.0


def test_one_of_each_label_is_left_to_fit_on():
    labels = np.array([False] * 4 + [True] * 4)
    held = held_out(labels, 0.9, 0)
    assert [(~held)[labels == label].sum() for label in (False, True)] == [1, 1]


def test_a_text_of_one_token_is_refused_where_the_first_is_left_out(write, tmp_path):
    with (tmp_path / "texts.jsonl").open("a") as file:
        file.write('{"prompt": "yes", "label": "target"}\n')
    experiment = write(("layer = 1", 'tokens = "all"\nlayer = 1'))
    model = MemoryModel()
    with pytest.raises(UsageError, match=r'line 8: probe\.fit: got one token in "yes", expected 2 or more'):
        fit_probe(experiment, "probe", experiment.probe, Fitter(model, model.rows), tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "content", "line", "words"),
    [
        ('fit = "texts.jsonl"', 'fit = "x.jsonl"', '{"prompt": "w", "label": "target"}\n' * 3, 8, "3 positive and 0"),
        ("layer = 1", 'positive = ["targt"]\nlayer = 1', "", 8, 'the labels found: "benign", "target"'),
        ("layer = 1", 'prompt = "txt"\nlayer = 1', "", 8, "line 1: no field txt"),
        ('fit = "pairs.jsonl"', 'fit = "x.jsonl"', '{"positive": "w"}\n', 16, "x.jsonl, line 1"),
        ('fit = "pairs.jsonl"', 'fit = "x.jsonl"', '{"positive": "v", "negative": "w"}\n', 16, "got 1 pair, expect"),
        ('fit = "texts.jsonl"\nlayer = 1', 'file = "x.jsonl"', "no probe", 8, "expected a file of one linear probe"),
        ('fit = "pairs.jsonl"', 'file = "x.jsonl"', "no vector", 16, "expected a file of vectors"),
        ("[sweep]", '[judge]\ncommand = ["no-such-program"]\n[sweep]', "", 19, "got no-such-program, expected"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_files_that_a_run_cannot_use(write, tmp_path, before, after, content, line, words):
    (tmp_path / "x.jsonl").write_text(content)
    experiment = write((before, after))
    with pytest.raises(UsageError) as e:
        check_files(experiment, [2])
    assert f"experiment.toml, line {line}: " in str(e.value)
    assert words in str(e.value)
    with pytest.raises(UsageError, match="line "):
        run(ExperimentJob(str(experiment.path), dry_run=True))


@pytest.mark.parametrize(
    ("probe", "hook", "is_after"),
    [("pre_attn", "post_block", True), ("post_block", "pre_attn", False), ("post_attn", "mlp_out", True)],
)
def test_a_gate_in_the_graph_acts_at_sites_that_the_forward_pass_reaches_after_its_probe(write, probe, hook, is_after):
    experiment = write(("[arms.gated_sync]", "[arms.in_graph]"))
    expected = contextlib.nullcontext() if is_after else pytest.raises(UsageError, match="after the probe's site")
    with expected:
        check_layers(settings_of(experiment, 0.0), experiment, probe=Site(2, probe), hook=hook, layers=None)


def test_a_prompt_without_room_for_its_answer_is_named_before_anything_runs(write):
    experiment = write(("[arms.shadow]", '[arms.prompt_only]\ntemplate = "be kind {prompt}"'))
    settings = settings_of(experiment, 0.0)
    prompts = [LabelledPrompt(0, "p0", "a", "target"), LabelledPrompt(1, "p1", "a b c", "benign")]

    def count(text):
        return len(text.split())

    check_room(experiment, settings, prompts, count, 5 + 8 + 1)
    with pytest.raises(UsageError, match=r"line 2: max_tokens: got 5 tokens in prompt p1 of arm prompt_only"):
        check_room(experiment, settings, prompts, count, 5 + 8)
    with pytest.raises(UsageError, match=r"got 3 tokens in prompt p1 of arm baseline.*raise max_model_len"):
        check_room(experiment, settings, prompts, count, 3 + 8)


def test_a_comma_in_the_output_s_name_is_no_end_of_an_option(write, tmp_path):
    experiment = write()
    out = tmp_path / r"a,b\,c"
    directions, files, _ = resolved(experiment, out)
    for text in gates_of(settings_of(experiment, 0.5), experiment, directions, files):
        assert Probe.load(parse(text)[1]["probe"]).site == Site(1, "post_block")


def test_fits_of_another_version_are_refused(write, tmp_path):
    experiment = write()
    resolved(experiment, tmp_path / "out")
    (tmp_path / "out" / "fits.json").write_bytes(msgspec.json.encode([1]))
    with pytest.raises(UsageError, match=r"fits\.json.*choose another directory"):
        resolved(experiment, tmp_path / "out")
