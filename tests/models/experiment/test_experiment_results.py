"""The results of experiments, from cells that are made here."""

import json
import sys

import duckdb
import msgspec
import numpy as np
import pytest

from capflow_models.experiment.arms import settings_of
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import DirectionFit
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import Cell
from capflow_models.experiment.results.export import export
from capflow_models.experiment.results.judge import judged_scores
from capflow_models.experiment.results.manifest import Manifest
from capflow_models.experiment.results.metrics import Match, judge_id, tables_of
from capflow_models.experiment.results.report import broken_lines, verdict, write_report

GOOD = """\
model = "demo"
metrics = ["gate_rate", "score_max", "judge", "kl"]
resamples = 200

[prompts]
path = "prompts.jsonl"

[probe]
fit = "prompts.jsonl"
layer = 2

[vector]
fit = "prompts.jsonl"

[judge]
command = ["true"]

[sweep]
layer = [3]
scale = [1.0]

[arms.baseline]
[arms.always_on]
[arms.in_graph]
"""
NAN = float("nan")


@pytest.fixture
def write(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("{}\n")

    def write(*changes):
        text = GOOD
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        (tmp_path / "experiment.toml").write_text(text)
        return Experiment.read(tmp_path / "experiment.toml")

    return write


def make_cell(setting, prompt, seed=0, **fields):
    base = {
        "threshold": setting.threshold, "sharpness": setting.sharpness, "scale": setting.scale, "layer": setting.layer,
        "prompt_id": prompt.id, "label": prompt.label, "seed": seed, "digest": "", "prompt": prompt.prompt,
        "text": "w", "tokens": [5], "prompt_tokens": 1, "finish": "length", "block": 0, "turn": 0,
    }  # fmt: skip
    return Cell(setting.arm, setting.kind, **(base | fields))


def prompts_of(count):
    return [LabelledPrompt(n, f"p{n}", "w", "benign" if n % 2 else "target") for n in range(2 * count)]


def compared(experiment, effects, harms, count=4):
    """Return the matches if every setting has an effect on target prompts and a harm on benign ones.

    effects, harms: by arm and scale.
    """
    settings, prompts = settings_of(experiment, 0.5), prompts_of(count)
    cells, judged = [], {}
    for setting in settings:
        for prompt in prompts:
            cell = make_cell(setting, prompt, kl=[harms.get((setting.arm, setting.scale), 0.0)])
            cells.append(cell)
            judged[judge_id(cell)] = effects.get((setting.arm, setting.scale), 0.0)
    return tables_of(experiment, settings, prompts, cells, judged).matches


def test_a_curve_has_the_scales_of_the_setting_s_sign_from_the_smallest_on(write):
    experiment = write(("scale = [1.0]", "scale = [-2.0, -1.0, 1.0]"))
    effects = {("always_on", -2.0): -2.0, ("always_on", -1.0): -1.0, ("always_on", 1.0): -0.5}
    harms = {("always_on", -2.0): 4.0, ("always_on", -1.0): 1.0, ("always_on", 1.0): 9.0}
    effects |= {("in_graph", -2.0): -1.5, ("in_graph", -1.0): -0.5, ("in_graph", 1.0): -0.25}
    matches = compared(experiment, effects, harms)
    assert [match.other_harm[0] for match in matches] == [2.5, 0.5, 4.5]


def test_a_setting_is_compared_with_the_arm_that_acts_at_the_same_positions(write):
    arms = "[arms.always_on]\n[arms.everywhere]\nkind = 'always_on'\nat = 'all'\n"
    experiment = write(("[arms.always_on]\n", arms))
    effects = {("always_on", 1.0): 2.0, ("everywhere", 1.0): 1.0, ("in_graph", 1.0): 1.0}
    harms = {("always_on", 1.0): 4.0, ("everywhere", 1.0): 10.0}
    (match,) = compared(experiment, effects, harms)
    assert (match.other, match.other_harm[0]) == ("always_on", 2.0)
    prompt = write(("[arms.always_on]\n", arms), ("[arms.in_graph]", "[arms.in_graph]\nat = 'prompt'"))
    assert [(m.other, m.other_harm[0]) for m in compared(prompt, effects, harms)] == [
        ("always_on", 2.0), ("everywhere", 10.0)
    ]  # fmt: skip


def test_one_prompt_of_a_label_shows_nothing(write):
    effects = {("always_on", 1.0): 2.0, ("in_graph", 1.0): 1.0}
    harms = {("always_on", 1.0): 4.0}
    (one,) = compared(write(), effects, harms, count=1)
    assert one.difference[0] == -2.0
    assert np.isnan(one.difference[1:]).all()
    assert verdict(one) == "too few prompts"
    (two,) = compared(write(), effects, harms, count=2)
    assert verdict(two) == "less harm"


@pytest.mark.parametrize(
    ("difference", "reached", "expected"),
    [
        ((NAN, -0.9, -0.4), 0.7, "always_on does not reach the effect"),
        ((-0.4, NAN, NAN), 0.3, "always_on reaches the effect in 30% of the resamples only"),
        ((-0.4, -0.9, -0.1), 0.7, "less harm"),
        ((0.4, 0.1, 0.9), 1.0, "more harm"),
        ((0.4, -0.1, 0.9), 1.0, "no difference shown"),
    ],
)
def test_a_verdict_needs_the_other_arm_to_reach_the_effect(difference, reached, expected):
    one = (1.0, 0.5, 1.5)
    assert verdict(Match("in_graph-0", "always_on", one, one, one, difference, reached)) == expected


def test_a_gate_that_always_fired_has_an_interval(write):
    experiment, prompts = write(), prompts_of(24)
    settings = settings_of(experiment, 0.5)
    cells = [make_cell(s, p, first_firing=None if p.label == "benign" else 0) for s in settings for p in prompts]
    rows = {row.label: row for row in tables_of(experiment, settings, prompts, cells, {}).rows if row.arm == "in_graph"}
    assert (rows["target"].mean, rows["target"].low, rows["target"].high) == (1.0, pytest.approx(0.862, abs=1e-3), 1.0)
    assert (rows["benign"].mean, rows["benign"].low, rows["benign"].high) == (0.0, 0.0, pytest.approx(0.138, abs=1e-3))


def test_a_point_of_the_roc_is_the_gate_rate_at_its_threshold_with_several_seeds_too(write):
    experiment = write(('model = "demo"', 'model = "demo"\nseeds = [0, 1]'), ("[arms.in_graph]", "[arms.shadow]"))
    settings, prompts = settings_of(experiment, 1.5), prompts_of(2)
    scores = {("target", 0): 2.0, ("target", 1): 0.0, ("benign", 0): -1.0, ("benign", 1): 1.0}
    cells = [
        make_cell(
            s, p, seed, scores=[score := scores[p.label, seed]], score_positions=[0],
            first_firing=0 if s.kind == "shadow" and score >= 1.5 else None,
        )
        for s in settings for p in prompts for seed in (0, 1)
    ]  # fmt: skip
    tables = tables_of(experiment, settings, prompts, cells, {})
    (roc,) = tables.separations
    rates = [row.mean for row in tables.rows if (row.metric, row.label) == ("gate_rate", "target")]
    assert rates == [0.5]
    assert dict(zip(roc.thresholds, roc.true, strict=True))[2.0] == 0.5
    assert roc.auc == 0.75
    assert roc.low <= roc.auc <= roc.high


def test_answers_with_values_that_are_no_numbers_are_counted_and_never_near_the_baseline(write):
    experiment, prompts = write(), prompts_of(2)
    settings = settings_of(experiment, 0.5)
    cells = [
        make_cell(s, p, kl=[0.0, NAN] if s.arm == "always_on" and p.id != "p0" else [0.0, 0.5])
        for s in settings for p in prompts
    ]  # fmt: skip
    tables = tables_of(experiment, settings, prompts, cells, {})
    row = next(r for r in tables.rows if (r.arm, r.metric, r.label) == ("always_on", "kl", "all"))
    assert (row.prompts, row.mean) == (1, 0.25)
    assert broken_lines(settings, cells) == [
        "always_on layer 3 scale 1: 3 of 4 answers have NaN or infinite values, which are in no mean"
    ]


JUDGE = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "score": SCORE}))
"""


def test_an_answer_is_judged_again_by_another_judge_and_only_then(write, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE.replace("SCORE", "1"))
    command = json.dumps([sys.executable, "judge.py"])
    experiment, prompts = write(('command = ["true"]', f"command = {command}")), prompts_of(1)
    cells = [make_cell(setting, prompts[0]) for setting in settings_of(experiment, 0.5)]
    assert set(judged_scores(experiment, cells, prompts, tmp_path).values()) == {1.0}
    kept = (tmp_path / "judged.jsonl").read_bytes()
    assert set(judged_scores(experiment, cells, prompts, tmp_path).values()) == {1.0}
    assert (tmp_path / "judged.jsonl").read_bytes() == kept
    judge.write_text(JUDGE.replace("SCORE", "2"))
    assert set(judged_scores(experiment, cells, prompts, tmp_path).values()) == {2.0}
    other = msgspec.structs.replace(experiment, judge=msgspec.structs.replace(experiment.judge, command=("false",)))
    with pytest.raises(Exception, match="exit code 1"):
        judged_scores(other, cells, prompts, tmp_path)


def test_settings_that_differ_little_have_different_names_for_the_judge(write):
    experiment = write(("scale = [1.0]", "scale = [0.1234561, 0.1234562]"))
    names = [judge_id(make_cell(setting, prompts_of(1)[0])) for setting in settings_of(experiment, 0.5)]
    assert len(set(names)) == len(names)


def test_tables_and_pictures_are_those_of_the_last_run(write, tmp_path):
    experiment, prompts = write(), prompts_of(2)
    settings = settings_of(experiment, 0.5)
    cells = [
        make_cell(s, p, kl=[0.5], scores=[float(p.label == "target")], score_positions=[0])
        for s in settings for p in prompts
    ]  # fmt: skip
    judged = {judge_id(cell): float(cell.arm == "in_graph") for cell in cells}
    tables = tables_of(experiment, settings, prompts, cells, judged)
    fits = [DirectionFit("probe", "texts.csv", "post_block:2", 8, 4, 0.75, 0.5, 2.0)]
    manifest = Manifest("capflow", {}, {}, (0,), "machine", "now", 1.0)
    export(experiment, cells, judged, tables, fits, tmp_path)
    write_report(experiment, settings, prompts, cells, tables, fits, manifest, tmp_path)
    with duckdb.connect(str(tmp_path / "experiment.duckdb"), read_only=True) as database:
        assert database.sql("SELECT setting, auc FROM separations").fetchall() == [("baseline-0", 1.0)]
        assert database.sql('SELECT "true", "false" FROM roc WHERE threshold = 1').fetchall() == [(1.0, 0.0)]
        assert database.sql("SELECT name, site, auc FROM fits").fetchall() == [("probe", "post_block:2", 0.75)]
    page = (tmp_path / "report.html").read_text()
    assert page.count("Difference to the baseline, paired by prompt") == 2
    assert "<th>reached</th>" in page
    assert (tmp_path / "plots" / "gate.png").exists()
    (tmp_path / "plots" / "mine.png").touch()

    plain = write(
        (GOOD[GOOD.index("[probe]") : GOOD.index("[judge]")], ""), ('"gate_rate", "score_max", ', ""),
        ("[arms.in_graph]\n", ""), ("[arms.always_on]\n", ""),
    )  # fmt: skip
    cells = [msgspec.structs.replace(cell, scores=[], score_positions=[]) for cell in cells if cell.arm == "baseline"]
    settings = settings_of(plain, 0.5)
    tables = tables_of(plain, settings, prompts, cells, judged)
    export(plain, cells, judged, tables, [], tmp_path)
    write_report(plain, settings, prompts, cells, tables, [], manifest, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.parquet")} == {"cells", "tokens", "metrics"}
    assert not (tmp_path / "plots" / "gate.png").exists()
    assert (tmp_path / "plots" / "mine.png").exists()
