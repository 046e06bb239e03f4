"""Patch sweeps in a real engine against Transformers with forward hooks, resumption, and what the command writes."""

import json
import os
import subprocess
import sys

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import capflow
from capflow.capture.site import STREAM_HOOKS
from capflow.errors import UsageError
from capflow_models import SweepResult, sweep_ablate, sweep_patch
from capflow_models.sweep import patch, program
from capflow_models.sweep.program import SweepJob
from capflow_models.sweep.session import SweepSession
from tests.kit.engines import LAYERS, WIDTH, in_this_process
from tests.kit.hooked import Hooked
from tests.kit.sources import ROOT

pytestmark = pytest.mark.engine

BOUND = 1e-4
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": True,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 64 << 20,
}
POSITIONS = "0,changed,-3,last"


def words(numbers):
    return " ".join(f"w{n}" for n in numbers)


@pytest.fixture(scope="module")
def pairs():
    """Pairs in words and in token ids. The second prompts have more tokens than a block of the cache, which is 32."""
    rng = np.random.default_rng(0)
    begin, end = rng.integers(50, 290, 33).tolist(), rng.integers(50, 290, 6).tolist()
    return [
        {"id": "short", "clean": words([7, 60, 61, 8, 9]), "corrupted": words([7, 70, 71, 8, 9]), "answer": " w30",
         "wrong_answer": " w31"},
        {"id": "long", "clean": [*begin, 60, *end], "corrupted": [*begin, 70, *end], "answer": 40, "wrong_answer": 41},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A module of a user's metrics, which can be imported."""
    directory = tmp_path_factory.mktemp("functions")
    (directory / "my_metrics.py").write_text(
        "def rank(logits, answer, wrong_answer):\n    return (logits > logits[answer]).sum()\n\n"
        "def broken(logits, answer, wrong_answer):\n    return logits['answer']\n"
    )
    sys.path.append(str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def swept(tiny_with_words, pairs, functions, tmp_path_factory):
    """A finished sweep over every hook, its directory, and how many tokens of each request the prefix cache had."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    cached, runners = [], set()
    generate = capflow.LLM.generate

    def counted(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        cached.extend(output.num_cached_tokens for output in outputs)
        runners.add(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
        return outputs

    capflow.LLM.generate = counted
    try:
        with in_this_process():
            result = sweep_patch(
                tiny_with_words, pairs, hooks=STREAM_HOOKS, positions=POSITIONS, direction="both", out=out,
                engine=ENGINE,
                metrics=("logit_diff", "probability", "logprob", "kl", "my_metrics:rank"),
            )  # fmt: skip
    finally:
        capflow.LLM.generate = generate
    assert runners == {"0"}, "the second model runner has other logits processors"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    return result, out, cached


def measured(logits, clean, answer, wrong):
    logprobs, reference = logits.double().log_softmax(-1), clean.double().log_softmax(-1)
    return {
        "logit_diff": float(logits[answer] - logits[wrong]),
        "probability": float(logprobs[answer].exp()),
        "logprob": float(logprobs[answer]),
        "kl": float((reference.exp() * (reference - logprobs)).sum()),
        "my_metrics:rank": int((logits > logits[answer]).sum()),
    }


def test_every_patch_equals_transformers_with_hooks(swept, prompts, reference):
    result, out, cached = swept
    hooked = Hooked(reference.model)
    baselines = {
        name: [hooked.run(tokens) for tokens in (clean, corrupted)] for name, (clean, corrupted, *_) in prompts.items()
    }
    runs = {
        (run["pair"], run["direction"], run["site"], run["position"]): run
        for run in map(json.loads, (out / "runs.jsonl").read_bytes().splitlines())
    }
    rows = {}
    for row in result.to_arrow().to_pylist():
        rows.setdefault((row["pair"], row["direction"], row["hook"], row["layer"], row["position"]), []).append(row)
    assert len(rows) == 2 * (LAYERS * (len(STREAM_HOOKS) - 1) + 1) * (4 + 4), "final is a hook of the last layer alone"
    moved = 0.0
    for (pair, direction, hook, layer, position), mine in rows.items():
        clean, corrupted, answer, wrong = prompts[pair]
        (clean_logits, clean_rows), (corrupted_logits, corrupted_rows) = baselines[pair]
        tokens, donor = (corrupted, clean_rows) if direction == "denoise" else (clean, corrupted_rows)
        logits, _ = hooked.run(tokens, (layer, hook, position, donor[layer, hook][position]))
        expected, *ends = (
            measured(each, clean_logits, answer, wrong) for each in (logits, clean_logits, corrupted_logits)
        )
        stored = runs[pair, direction, f"{hook}:{layer}", position]
        assert stored["logits"] == pytest.approx([float(logits[answer]), float(logits[wrong])], abs=BOUND)
        assert stored["top"] == int(logits.argmax())
        assert {row["metric"] for row in mine} == expected.keys()
        for row in mine:
            metric = row["metric"]
            assert row["value"] == pytest.approx(expected[metric], abs=BOUND)
            assert row["clean"] == pytest.approx(ends[0][metric], abs=BOUND)
            assert row["corrupted"] == pytest.approx(ends[1][metric], abs=BOUND)
            if metric == "logit_diff":
                span = ends[0][metric] - ends[1][metric]
                assert row["recovery"] == pytest.approx((expected[metric] - ends[1][metric]) / span, abs=1e-3)
                moved = max(moved, abs(row["recovery"] - (direction == "noise")))
    assert moved > 0.9
    assert max(cached) >= 32, "the prefix cache was on, and patched requests shared blocks"


def test_the_tables_are_on_the_disk_and_in_duckdb(swept, tmp_path):
    result = swept[0]
    result.save(tmp_path / "saved")
    again = SweepResult.open(tmp_path / "saved")
    for name in ("patches", "summary", "pairs"):
        assert getattr(again, name).equals(getattr(result, name))
        assert pq.read_table(tmp_path / "saved" / f"{name}.parquet").num_rows
    with duckdb.connect(str(tmp_path / "saved" / "sweep.duckdb")) as database:
        best = database.execute(
            "SELECT hook, layer FROM patches WHERE metric = 'kl' AND direction = 'denoise' AND role = 'last' "
            "GROUP BY ALL HAVING max(abs(recovery - 1)) < 1e-3"
        ).fetchall()
    assert ("post_block", LAYERS - 1) in best, "the last row of the last layer decides the next token"
    assert len(result.to_pandas()) == result.to_arrow().num_rows
    page = result._repr_html_()
    assert "data:image/png;base64," in page
    assert "recovery of logit_diff, noise" in page


def test_a_stopped_sweep_continues(swept, tiny_with_words, pairs, tmp_path, monkeypatch):
    whole, _, _ = swept
    out, counts = tmp_path / "out", []

    def stop(done, total):
        counts.append((done, total))
        if done > 100:
            raise KeyboardInterrupt

    options = {
        "hooks": STREAM_HOOKS, "positions": POSITIONS, "direction": "both", "out": out, "engine": ENGINE, "batch": 64,
        "metrics": ("logit_diff",),
    }  # fmt: skip
    computing, missing = [], patch._missing

    def held(*args):
        computing.append(missing(*args))
        return computing[0]

    with monkeypatch.context() as patched:
        patched.setattr(patch, "_missing", held)
        with in_this_process(), pytest.raises(KeyboardInterrupt):
            sweep_patch(tiny_with_words, pairs, **options, progress=stop)
    assert not list(out.glob(".capflow-sweep-*")), "the engine is closed, and its rows are removed"
    assert "CAPFLOW_MEASURED_OUT" not in os.environ
    total = counts[-1][1]
    lines = (out / "runs.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == counts[-1][0] < total
    with (out / "runs.jsonl").open("ab") as file:
        file.write(b'{"pair":"short","dir')
    asked = []
    generate = capflow.LLM.generate
    monkeypatch.setattr(
        capflow.LLM, "generate", lambda self, p, *a, **k: asked.append(len(p)) or generate(self, p, *a, **k)
    )
    with in_this_process():
        result = sweep_patch(tiny_with_words, pairs, **options)
    assert sum(asked) <= total - len(lines) + 4, "only the missing runs are computed, and the baselines they need"
    assert not list(out.glob(".capflow-sweep-*"))
    key = ["pair", "direction", "hook", "layer", "index", "position"]
    metric = whole.patches.filter(np.array(whole.patches["metric"]) == "logit_diff")
    for name in key:
        assert result.patches[name].equals(metric[name])
    assert np.abs(result.patches["value"].to_numpy() - metric["value"].to_numpy()).max() < BOUND
    settings = {"engine": ENGINE, "out": out, "hooks": STREAM_HOOKS, "positions": POSITIONS, "direction": "both"}
    for change, message in (
        (
            {"engine": {**ENGINE, "max_num_seqs": 8}},
            "the engine's max_num_seqs: got 16 there, expected 8; choose another",
        ),
        ({"metrics": ("my_metrics:rank",)}, "the metric my_metrics:rank: got nothing there, expected "),
    ):
        with pytest.raises(UsageError, match=message):
            sweep_patch(tiny_with_words, pairs, **(settings | change))
    other = [{**pairs[0], "answer": " w33"}, pairs[1]]
    with pytest.raises(UsageError, match="pair short: got other prompts or answers there"):
        sweep_patch(tiny_with_words, other, **settings)


@pytest.fixture(scope="module")
def prompts(pairs):
    """Each pair's clean and corrupted tokens, the answer and the wrong answer."""
    return {
        "short": ([7, 60, 61, 8, 9], [7, 70, 71, 8, 9], 30, 31),
        "long": (pairs[1]["clean"], pairs[1]["corrupted"], 40, 41),
    }


@pytest.fixture
def captured(monkeypatch):
    """Return the baselines whose rows sweeps capture, one for each group of pairs."""
    captured, keep = [], SweepSession._keep_rows
    monkeypatch.setattr(SweepSession, "_keep_rows", lambda self, *args: captured.append(args[-1]) or keep(self, *args))
    return captured


def test_an_ablation_equals_transformers_with_hooks(tiny_with_words, pairs, prompts, reference, tmp_path, captured):
    options = {"hooks": ("mlp_out", "pre_attn"), "layers": [1, 2], "positions": "1,last", "metrics": ("logit_diff",)}
    with in_this_process():
        result = sweep_ablate(tiny_with_words, pairs, by="both", out=tmp_path / "out", engine=ENGINE, **options)
    assert captured == ["clean", "corrupted"], "for the mean alone"
    hooked = Hooked(reference.model)
    rows = [hooked.run(tokens)[1] for clean, corrupted, *_ in prompts.values() for tokens in (clean, corrupted)]
    patches = result.patches.to_pylist()
    assert len(patches) == 2 * 2 * 2 * 2 * 2
    for row in patches:
        at = (row["layer"], row["hook"])
        new = {"zero": torch.zeros(WIDTH), "mean": torch.cat([each[at][1:] for each in rows]).mean(0)}[row["direction"]]
        clean, _, answer, wrong = prompts[row["pair"]]
        logits, _ = hooked.run(clean, (*at, row["position"], new))
        assert row["value"] == pytest.approx(float(logits[answer] - logits[wrong]), abs=BOUND)
    assert max(abs(row["recovery"] - 1) for row in patches) > 0.3
    with pytest.raises(UsageError, match="the mean: got means over other prompts there"):
        sweep_ablate(tiny_with_words, pairs[:1], by="mean", out=tmp_path / "out", engine=ENGINE, **options)
    with pytest.raises(UsageError, match="by: got noise, expected one of zero, mean, resample, both, all"):
        sweep_ablate(tiny_with_words, pairs, by="noise")
    with pytest.raises(UsageError, match="layer: got an unknown option, expected one of align, batch"):
        sweep_ablate(tiny_with_words, pairs, layer=3)


@pytest.mark.long
def test_a_sweep_measures_where_vllm_would_take_the_second_model_runner(tiny_with_words, pairs, swept, tmp_path):
    """Triton's interpreter stands for a GPU: with it, vLLM's default is the runner with other logits processors."""
    paths = [str(ROOT), str(ROOT / "tests" / "kit" / "triton_cpu"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:1]))
    out = tmp_path / "out"
    job = {
        "model": tiny_with_words, "pairs": str(tmp_path / "pairs.jsonl"), "out": str(out), "hooks": "post_block",
        "layers": "1", "positions": "last", "direction": "denoise", "metrics": "logit_diff", "batch": 8,
        "resamples": 1, "confidence": 0.9, "engine": ENGINE,
    }  # fmt: skip
    command = [sys.executable, "-m", "capflow_models.sweep.program", json.dumps(job)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = pq.read_table(out / "patches.parquet").to_pylist()
    same = {name: row[name] for name in ("pair", "direction", "hook", "layer", "position", "metric")}
    (expected,) = (each for each in swept[0].patches.to_pylist() if same.items() <= each.items())
    assert row["value"] == pytest.approx(expected["value"], abs=BOUND)
    refused = subprocess.run(
        command, env=variables | {"VLLM_USE_V2_MODEL_RUNNER": "1"}, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "VLLM_USE_V2_MODEL_RUNNER: got 1, expected 0, as a sweep needs" in refused.stderr


def test_a_function_that_fails_is_named(tiny_with_words, pairs, functions):
    with in_this_process(), pytest.raises(UsageError, match="the metric my_metrics:broken: got IndexError"):
        sweep_patch(tiny_with_words, pairs[:1], layers=[0], metrics=["my_metrics:broken"], engine=ENGINE)


def test_the_command_writes_a_report(tiny_with_words, pairs, tmp_path, capsys, captured):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = SweepJob(
        tiny_with_words, str(tmp_path / "pairs.jsonl"), str(tmp_path / "out"), "post_block", "1-2", "all", "denoise",
        "logit_diff,kl", 512, 100, 0.999, engine=ENGINE,
    )  # fmt: skip
    program.run(SweepJob(**{name: getattr(job, name) for name in job.__struct_fields__} | {"dry_run": True}))
    assert "2 pairs of 5 to 40 tokens, 2 sites, 5 to 40 positions, denoise" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    with in_this_process():
        program.run(job)
    assert captured == ["clean"]
    written = capsys.readouterr().err
    assert "capflow: 94 of 94 runs" in written
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http" not in page, "the report needs no network"
    assert "with 99.9% bootstrap intervals" in page
    assert page.count("data:image/png;base64,") == 2
    assert {path.name for path in (tmp_path / "out" / "plots").iterdir()} == {
        "denoise-kl.png",
        "denoise-logit_diff.png",
    }
    program.run(job)
    assert "94 of 94 runs already exist" in capsys.readouterr().err
