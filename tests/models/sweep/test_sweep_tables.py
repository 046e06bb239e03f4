"""The tables of sweeps, computed from given runs and compared with NumPy, one pair after another."""

import dataclasses
import math

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow_models.experiment.results.statistics import draw
from capflow_models.sweep.metrics import SweepRun
from capflow_models.sweep.pairs import PairReader, read_pairs
from capflow_models.sweep.parts import RowPart
from capflow_models.sweep.plan import PatchPositions, RunKey, SweepPlan
from capflow_models.sweep.records import encoded, runs_of
from capflow_models.sweep.results import tables
from capflow_models.sweep.results.heatmap import figure_of, printable, strongest
from capflow_models.sweep.results.report import weak_lines, write_report
from capflow_models.sweep.results.result import SweepResult
from capflow_models.sweep.results.tables import align_of, pairs_table, patches_table, summary_table

METRICS = ("logit_diff", "probability", "kl", "m:f")


def plan_of(lengths=(5, 5, 5)):
    rng = np.random.default_rng(0)
    pairs = []
    for length in lengths:
        clean = rng.integers(0, 100, length).tolist()
        corrupted = [*clean[:1], *(token + 100 for token in clean[1:3]), *clean[3:]]
        pairs.append({"clean": clean, "corrupted": corrupted, "answer": 1, "wrong_answer": 2})
    tokens = PairReader(None, 300).tokens(*read_pairs(pairs))
    parts = [RowPart(Site(layer, "post_block")) for layer in range(2)]
    return SweepPlan("m", tokens, parts, [range(len(p.clean)) for p in tokens], ["denoise", "noise"], {"m:f": ""}, {})


def runs_for(plan, seed=1):
    rng = np.random.default_rng(seed)
    return {
        key: SweepRun(
            *key,
            tuple(rng.normal(size=2).tolist()),
            tuple((-rng.random(2)).tolist()),
            rng.random(),
            3,
            {"m:f": rng.normal()},
        )
        for number in range(len(plan.pairs))
        for key in plan.keys(number)
    }


def result_of(plan, runs, align="position", resamples=200):
    patches = patches_table(plan, runs, METRICS)
    lengths = {pair.id: len(pair.clean) for pair in plan.pairs}
    summary = summary_table(patches, lengths, align, resamples, 0.9)
    return SweepResult(patches, summary, pairs_table(plan, runs, METRICS))


def test_recovery_is_0_for_the_corrupted_run_and_1_for_the_clean_one():
    plan = plan_of()
    runs = runs_for(plan)
    clean, corrupted = (
        next(run for key, run in runs.items() if key.direction == name) for name in ("clean", "corrupted")
    )
    at = [key for key in runs if key.pair == clean.pair and key.direction == "denoise"]
    for key, source in ((at[0], clean), (at[1], corrupted)):
        runs[key] = SweepRun(*key, source.logits, source.logprobs, source.kl, 0, source.values)
    rows = patches_table(plan, runs, METRICS).to_pylist()
    assert [row["recovery"] for row in rows[: len(METRICS)]] == pytest.approx([1.0] * len(METRICS))
    assert [row["recovery"] for row in rows[len(METRICS) : 2 * len(METRICS)]] == pytest.approx([0.0] * len(METRICS))
    assert (rows[0]["pair"], rows[0]["token"], rows[0]["hook"], rows[0]["layer"], rows[0]["position"]) == (
        clean.pair, str(plan.pairs[0].clean[0]), "post_block", 0, 0,
    )  # fmt: skip
    row = next(row for row in rows if row["metric"] == "probability" and row["direction"] == "noise")
    assert row["clean"] == math.exp(clean.logprobs[0])
    assert row["value"] == math.exp(runs[next(key for key in runs if key.direction == "noise")].logprobs[0])


def test_means_and_intervals_are_those_of_numpy():
    plan = plan_of()
    result = result_of(plan, runs_for(plan), resamples=4000)
    rows = result.patches.to_pylist()
    for cell in result.summary.to_pylist():
        mine = [
            row for row in rows
            if all(row[name] == cell[name] for name in ("direction", "hook", "layer", "metric"))
            and row["position"] == cell["place_number"]
        ]  # fmt: skip
        assert len(mine) == cell["pairs"] == 3
        value, clean, corrupted = (np.array([row[name] for row in mine]) for name in ("value", "clean", "corrupted"))
        assert cell["value"] == pytest.approx(value.mean())
        assert cell["recovery"] == pytest.approx((value - corrupted).sum() / (clean - corrupted).sum())
        every = np.array([[a, b, c] for a in range(3) for b in range(3) for c in range(3)])
        low, high = np.quantile(value[every].mean(1), (0.05, 0.95))
        assert low - 0.1 <= cell["value_low"] <= cell["value"] <= cell["value_high"] <= high + 0.1
        exact = np.sort(value[every].mean(1))
        assert np.abs(exact - cell["value_low"]).min() < 1e-9 or low <= cell["value_low"] <= exact[3]
        drawn = draw(["pair"] * 3, 4000)
        recoveries = (value - corrupted)[drawn].sum(1) / (clean - corrupted)[drawn].sum(1)
        bounds = np.quantile(recoveries, (0.05, 0.95))
        assert (cell["recovery_low"], cell["recovery_high"]) == pytest.approx(tuple(bounds), rel=1e-6)


def test_intervals_are_the_same_in_parts_and_take_bounded_memory(monkeypatch):
    plan = plan_of()
    runs = runs_for(plan)
    for key in list(runs)[2:6]:
        runs[key] = SweepRun(*key, (math.nan, 0.0), runs[key].logprobs, math.inf, 0, runs[key].values)
    whole = result_of(plan, runs).summary
    monkeypatch.setattr(tables, "_ELEMENTS_MAX", 7 * 200)
    sizes, means = [], tables._means

    def counted(counts, value, clean, corrupted):
        sizes.append(len(counts) * value.shape[1])
        return means(counts, value, clean, corrupted)

    monkeypatch.setattr(tables, "_means", counted)
    assert result_of(plan, runs).summary.equals(whole)
    assert max(sizes) == 7 * 200
    single, sizes[:] = plan_of((5,)), []
    assert set(result_of(single, runs_for(single)).summary["recovery_low"].to_pylist()) == {None}
    assert len(sizes) == 1, "a single pair is not resampled"


def test_roles_join_pairs_of_different_lengths_and_average_within_a_pair():
    plan = plan_of((5, 8))
    assert align_of(plan.pairs) == "role"
    runs = runs_for(plan)
    result = result_of(plan, runs, align_of(plan.pairs))
    cell = next(
        row for row in result.summary.to_pylist()
        if (row["direction"], row["layer"], row["place"], row["metric"]) == ("denoise", 1, "after", "m:f")
    )  # fmt: skip
    assert cell["pairs"] == 1, "the short pair has no token between the first after the change and the last"
    assert cell["value_low"] is None
    mine = [run.values["m:f"] for key, run in runs.items()
            if key[:3] == ("2", "denoise", "post_block:1") and 4 <= key.position < 7]  # fmt: skip
    assert cell["value"] == pytest.approx(np.mean(mine))
    ends = result_of(plan, runs, "end").summary.to_pylist()
    assert {row["place"] for row in ends} == {str(n) for n in range(-8, 0)}
    assert {row["pairs"] for row in ends if row["place"] == "-1"} == {2}
    assert {row["pairs"] for row in ends if row["place"] == "-8"} == {1}


def test_places_from_the_end_are_those_of_the_prompt_whatever_is_patched():
    plan = plan_of((5, 8))
    at = PatchPositions.parse("changed")
    plan = dataclasses.replace(plan, positions=[at.of(pair) for pair in plan.pairs])
    rows = result_of(plan, runs_for(plan), "end").summary.to_pylist()
    assert {(row["place"], row["place_number"], row["pairs"]) for row in rows} == {
        ("-4", -4, 1), ("-3", -3, 1), ("-7", -7, 1), ("-6", -6, 1)
    }  # fmt: skip


def test_a_pair_without_a_difference_has_no_recovery_and_nan_is_null():
    plan = plan_of((5,))
    runs = runs_for(plan)
    clean, corrupted = list(runs)[:2]
    runs[corrupted] = SweepRun(*corrupted, runs[clean].logits, (-1.0, -2.0), math.nan, 0, {"m:f": math.inf})
    lines = encoded(runs.values())
    again = runs_of(plan, lines, "runs.jsonl")
    assert math.isnan(again[corrupted].kl)
    assert again[corrupted].values == {"m:f": math.inf}
    result = result_of(plan, again)
    rows = result.patches.to_pylist()
    assert {row["recovery"] for row in rows if row["metric"] == "logit_diff"} == {None}
    assert {row["corrupted"] for row in rows if row["metric"] == "kl"} == {None}
    assert {row["recovery"] for row in result.summary.to_pylist() if row["metric"] == "logit_diff"} == {None}
    caption, _ = figure_of(result.summary, "denoise", "logit_diff")
    assert "mean over 1 pair." in caption
    assert weak_lines(result) == [
        "logit_diff: 1 of 1 pairs are no higher clean than corrupted (1)",
        *(
            []
            if runs[clean].logprobs[0] > -1.0
            else ["probability: 1 of 1 pairs are no higher clean than corrupted (1)"]
        ),
        "kl: 1 of 1 pairs differ by less than 5% of the median, or have no value (1)",
    ]


def test_a_baseline_of_nan_is_weak_and_empty_in_the_report(tmp_path):
    plan = plan_of()
    runs = runs_for(plan)
    clean = next(iter(runs))
    runs[clean] = SweepRun(*clean, (math.nan, 0.0), (math.nan, -1.0), math.nan, 0, {"m:f": math.nan})
    result = result_of(plan, runs)
    lines = weak_lines(result)
    assert sum("(1" in line for line in lines) == len(METRICS)
    write_report(result, {"kind": "patch", "model": "m", "confidence": "90%"}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    corrupted = runs[RunKey("1", "corrupted")]
    assert f"<td> / {corrupted.logits[0] - corrupted.logits[1]:.3g}</td>" in page


def test_pairs_whose_unchanged_runs_hardly_differ_are_named_for_every_metric():
    plan = plan_of((5,) * 5)
    runs = runs_for(plan)
    for number, pair in enumerate(plan.pairs):
        span = 0.04 if number == 3 else 1.0 + number
        for name, value in (("clean", span), ("corrupted", 0.0)):
            key = RunKey(pair.id, name)
            runs[key] = SweepRun(*key, (value, 0.0), (value - 9.0, -1.0), 1.0 - value, 0, {"m:f": -value})
    fault = "1 of 5 pairs differ by less than 5% of the median, or have no value (4)"
    assert weak_lines(result_of(plan, runs)) == [f"{metric}: {fault}" for metric in METRICS]


def test_the_heatmap_has_a_panel_for_each_hook_and_the_means(tmp_path):
    plan = plan_of()
    result = result_of(plan, runs_for(plan))
    figure = result.heatmap("kl", "noise")
    image = figure.axes[0].images[0].get_array()
    rows = {(row["layer"], row["place_number"]): row["recovery"] for row in result.summary.to_pylist()
            if (row["direction"], row["metric"]) == ("noise", "kl")}  # fmt: skip
    assert image.shape == (2, 5)
    assert figure.axes[0].get_facecolor() == (0.75, 0.75, 0.75, 1.0)  # of cells without a run
    assert all(image[layer, place] == recovery for (layer, place), recovery in rows.items())
    with pytest.raises(UsageError, match="metric: got loss, expected one of logit_diff, probability, kl, m:f"):
        result.heatmap("loss")
    best = strongest(result.summary, "noise", "kl", 3)
    assert [abs(row["recovery"] - 1) for row in best] == sorted((abs(r - 1) for r in rows.values()), reverse=True)[:3]
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.png").touch()
    write_report(result, {"kind": "patch", "model": "<m>", "confidence": "90%"}, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<m>" not in page
    assert "&lt;m&gt;" in page
    assert len(list((tmp_path / "plots").iterdir())) == 2 * len(METRICS)
    assert (printable(" a$b\n"), printable("  ")) == (r"a\$b⏎", "␣")


def test_a_directory_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected the output directory of a finished sweep"):
        SweepResult.open(tmp_path)
