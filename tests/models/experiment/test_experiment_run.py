"""Experiments on a tiny model in real engines: every arm, resumption after a kill, the dry run."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import duckdb
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import capflow
from capflow.errors import CapflowError, UsageError
from capflow_models.experiment import program
from capflow_models.experiment.program import ExperimentJob
from tests.kit.engines import collecting_little, environment, save_tiny, save_words
from tests.kit.hubs import running_hub
from tests.kit.waiting import eventually

pytestmark = pytest.mark.engine

ARMS = """
[arms.baseline]
[arms.always_on]
[arms.random]
scale = [1.0]
[arms.prompt_only]
template = "w9 {prompt}"
[arms.gated_async]
scale = [2.0]
[arms.shadow]
[arms.gated_sync]
scale = [2.0]
[arms.in_graph]
scale = [2.0]
[arms.soft]
kind = "in_graph"
scale = [2.0]
sharpness = [0.5]
"""
EXPERIMENT = """
model = "{model}"
seeds = [0, 1]
max_tokens = 6
temperature = 1.0
ignore_eos = true
batch = 4
resamples = 200

[prompts]
path = "prompts.jsonl"

[probe]
fit = "texts.csv"
layer = 1

[vector]
fit = "pairs.jsonl"

[held_out]
fit = "texts.csv"
layer = 2
tokens = "all"
method = "mean"

[judge]
command = ["{python}", "judge.py"]

[gate]
positions = "last_prompt"

[sweep]
layer = [2]
scale = [1.0, 2.0]
{arms}
[engine]
dtype = "float32"
enforce_eager = true
max_model_len = 128
max_num_seqs = 16
kv_cache_memory_bytes = 67108864
max_num_batched_tokens = 256
"""
JUDGE = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    print(json.dumps({"id": row["id"], "score": len(row["text"])}))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a model, and texts whose last words tell target from benign."""
    directory = tmp_path_factory.mktemp("experiment")
    save_tiny(directory / "model")
    save_words(directory / "model")
    rng = np.random.default_rng(0)

    def text(label):
        words = rng.integers(50, 290, 4)
        return " ".join(f"w{n}" for n in [*words, 20 if label == "target" else 10])

    labels = ["target", "benign"] * 12
    rows = [{"id": f"p{n}", "prompt": text(label), "label": label} for n, label in enumerate(labels[:8])]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "texts.csv").write_text("prompt,label\n" + "".join(f"{text(label)},{label}\n" for label in labels))
    pairs = [{"positive": text("target"), "negative": text("benign")} for _ in range(8)]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (directory / "judge.py").write_text(JUDGE)
    return directory


def write(directory, name, arms):
    path = directory / name
    path.write_text(EXPERIMENT.format(model=directory / "model", python=sys.executable, arms=arms))
    return path


def run(path, out, **options):
    """Run an experiment with its engines in this process."""
    with (
        environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"),
        collecting_little(),
    ):
        from vllm.distributed import cleanup_dist_env_and_memory

        try:
            program.run(ExperimentJob(str(path), out=str(out), **options))
        finally:
            cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def finished(directory):
    """Return the output of a whole run, in a directory of the user that has a comma in its name."""
    out = directory / "out,1"
    (out / "work").mkdir(parents=True)
    (out / "work" / "thesis.txt").write_text("mine")
    runners, generate = set(), capflow.LLM.generate

    def watched(self, *args, **kwargs):
        runners.add(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))
        return generate(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        patch.setattr(capflow.LLM, "generate", watched)
        run(write(directory, "experiment.toml", ARMS), out)
        assert "0" in runners, "the second model runner has other logits processors"
        assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    return out


def cells_of(out):
    return pq.read_table(out / "cells.parquet").to_pylist()


def test_every_arm_answers_every_prompt_with_every_seed(finished):
    cells = cells_of(finished)
    counts = {}
    for cell in cells:
        counts[cell["arm"]] = counts.get(cell["arm"], 0) + 1
    others = dict.fromkeys(
        ("baseline", "random", "prompt_only", "gated_async", "shadow", "gated_sync", "in_graph", "soft"), 16
    )
    assert counts == {"always_on": 32, **others}
    assert {cell["length"] for cell in cells} == {6.0}


def test_the_baseline_is_at_no_distance_from_itself_and_steered_arms_are_not(finished):
    kl = {}
    for cell in cells_of(finished):
        kl.setdefault(cell["arm"], []).append(cell["kl"])
    assert kl["baseline"] == [0.0] * 16
    assert min(kl["always_on"]) > 1e-4
    assert min(kl["random"]) > 1e-4
    assert min(kl["prompt_only"]) > 1e-4


def test_kl_and_perplexity_are_those_of_transformers(finished, directory):
    """Forced onto the baseline's tokens, the first distribution of prompt_only is that of its own prompt."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")

    def logprobs(text, tokens):
        start = tokenizer.encode(text)
        with torch.no_grad():
            logits = model(torch.tensor([start + tokens])).logits[0, len(start) - 1 : -1]
        return torch.log_softmax(logits, -1)

    lines = [json.loads(line) for line in (finished / "cells.jsonl").read_text().splitlines()]
    by_key = {(line["arm"], line["prompt_id"], line["seed"]): line for line in lines}
    for prompt, seed in (("p0", 0), ("p3", 1)):
        baseline, other = by_key["baseline", prompt, seed], by_key["prompt_only", prompt, seed]
        p, q = (logprobs(line["prompt"], baseline["tokens"]) for line in (baseline, other))
        expected = (p.exp() * (p - q)).sum(-1).numpy()
        assert other["kl"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        own = logprobs(baseline["prompt"], other["tokens"])
        losses = [-float(own[n, token]) for n, token in enumerate(other["tokens"])]
        assert other["nll"] == pytest.approx(losses, abs=1e-4)


def test_arms_are_interleaved_and_their_order_differs_between_blocks(finished):
    orders = {}
    for cell in cells_of(finished):
        orders.setdefault(cell["block"], {})[cell["turn"]] = cell["arm"], cell["scale"]
    assert len(orders) == 4
    assert all(len(order) == 10 for order in orders.values())
    assert len({tuple(order[turn] for turn in sorted(order)) for order in orders.values()}) > 1


def test_an_async_gate_steers_the_requests_that_it_fires_on_and_no_others(finished):
    lines = [json.loads(line) for line in (finished / "cells.jsonl").read_text().splitlines()]
    gated = [line for line in lines if line["arm"] == "gated_async"]
    fired = [line for line in gated if line["first_firing"] is not None]
    assert 0 < len(fired) < len(gated)
    for line in gated:
        if line not in fired:
            assert not line["actions"]
            assert max(line["kl"]) == 0.0
    assert any(max(line["kl"]) > 1e-6 for line in fired)


@pytest.mark.parametrize("arm", ["gated_sync", "in_graph"])
def test_gates_in_the_engine_open_for_target_prompts_and_leave_the_others_as_they_are(finished, arm):
    """A gate that opened at the prompt's last token steers every generated position, as always_on does."""
    lines = [json.loads(line) for line in (finished / "cells.jsonl").read_text().splitlines()]
    by_key = {(line["arm"], line["scale"], line["prompt_id"], line["seed"]): line for line in lines}
    gated = [line for line in lines if line["arm"] == arm]
    assert {(line["label"], line["first_firing"]) for line in gated} == {("target", -1), ("benign", None)}
    for line in gated:
        other = ("always_on", 2.0) if line["label"] == "target" else ("baseline", None)
        twin = by_key[*other, line["prompt_id"], line["seed"]]
        assert line["tokens"] == twin["tokens"]
        assert line["kl"] == pytest.approx(twin["kl"], rel=1e-3, abs=1e-5)
        assert set(line["steered"]) == {float(line["label"] == "target")}


def test_a_shadow_gate_fires_and_changes_nothing(finished):
    lines = [json.loads(line) for line in (finished / "cells.jsonl").read_text().splitlines()]
    baseline = {(line["prompt_id"], line["seed"]): line for line in lines if line["arm"] == "baseline"}
    shadow = [line for line in lines if line["arm"] == "shadow"]
    assert {line["first_firing"] for line in shadow} == {-1, None}
    for line in shadow:
        assert line["tokens"] == baseline[line["prompt_id"], line["seed"]]["tokens"]
        assert max(line["kl"]) < 1e-5


def test_a_soft_gate_acts_in_part(finished):
    lines = [json.loads(line) for line in (finished / "cells.jsonl").read_text().splitlines()]
    soft = [line for line in lines if line["arm"] == "soft"]
    assert all(0 < part < 1 for line in soft for part in line["steered"])
    assert all(max(line["kl"]) > 0 for line in soft)


def test_the_output_is_whole(finished):
    with duckdb.connect(str(finished / "experiment.duckdb"), read_only=True) as database:
        tables = {name for (name,) in database.sql("SHOW TABLES").fetchall()}
        assert tables == {"cells", "tokens", "metrics", "matches", "separations", "roc", "fits"}
        sql = "SELECT mean, low, high, prompts FROM metrics WHERE setting = 'always_on-1' AND metric = 'judge' "
        ((mean, low, high, prompts),) = database.sql(sql + "AND label = 'target'").fetchall()
        values = database.sql("SELECT prompt_id, avg(judge) FROM cells WHERE arm = 'always_on' AND scale = 2.0 "
                              "AND label = 'target' GROUP BY 1").fetchall()  # fmt: skip
        assert (mean, prompts) == (pytest.approx(np.mean([value for _, value in values])), 4)
        assert low <= mean <= high
        sql = "SELECT count(*), count(low) FROM metrics WHERE metric = 'ttft_ms'"
        ((speeds, with_interval),) = database.sql(sql).fetchall()
        assert speeds > 0
        assert with_interval == 0
        ((rows,),) = database.sql("SELECT count(*) FROM tokens WHERE arm = 'baseline' AND kl IS NOT NULL").fetchall()
        assert rows == 16 * 6
    manifest = json.loads((finished / "run.json").read_text())
    assert {"experiment.toml", "prompts.jsonl", "texts.csv", "pairs.jsonl"} <= manifest["files"].keys()
    assert manifest["versions"]["capflow"]
    assert manifest["command"].startswith("capflow experiment run ")
    page = (finished / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64,") == len(list((finished / "plots").glob("*.png"))) >= 4
    assert (finished / "work" / "thesis.txt").read_text() == "mine"
    assert not [path for path in finished.iterdir() if path.name.startswith(".")]


def test_a_finished_run_computes_nothing_again_and_makes_the_same_tables(finished, directory, capsys):
    before = (finished / "cells.jsonl").read_bytes(), (finished / "metrics.parquet").read_bytes()
    run(directory / "experiment.toml", finished)
    assert (finished / "cells.jsonl").read_bytes() == before[0]
    assert (finished / "metrics.parquet").read_bytes() == before[1]
    assert "160 of 160 answers already exist" in capsys.readouterr().err


def test_cells_of_another_sampling_are_refused(finished, directory):
    path = directory / "hotter.toml"
    path.write_text((directory / "experiment.toml").read_text().replace("temperature = 1.0", "temperature = 0.5"))
    with pytest.raises(UsageError, match="expected this file's settings; choose another directory with --out"):
        run(path, finished)


def test_cells_of_other_weights_under_the_same_name_are_refused(finished, directory):
    path = next((directory / "model").glob("*.safetensors"))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    os.utime(path, ns=(times[0], times[1] + 1))
    try:
        with pytest.raises(UsageError, match="got a cell with other settings or another model's files, expected this"):
            run(directory / "experiment.toml", finished)
    finally:
        os.utime(path, ns=times)


def test_an_argument_that_the_engine_lacks_is_refused_with_its_line(directory):
    path = write(directory, "wrong.toml", "[arms.baseline]\n")
    path.write_text(path.read_text().replace("max_model_len", "max_modl_len"))
    line = path.read_text().splitlines().index("max_modl_len = 128") + 1
    with pytest.raises(UsageError, match=rf"line {line}: engine\.max_modl_len: got max_modl_len.*near: max_model_len"):
        run(path, directory / "nowhere", dry_run=True)


def test_the_metric_kl_refuses_the_second_model_runner_before_an_engine_starts(directory, monkeypatch):
    path = write(directory, "second.toml", "[arms.baseline]\n")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UsageError, match="VLLM_USE_V2_MODEL_RUNNER: got 1, expected 0, as the metric kl needs"):
        run(path, directory / "nowhere", dry_run=True)
    path.write_text('metrics = ["duty"]\n' + path.read_text())
    run(path, directory / "nowhere", dry_run=True)


def test_a_hub_that_refused_the_engine_or_names_a_problem_ends_the_run(tmp_path):
    """The status is that of a real hub, which no engine and then a worker without working gates joins."""
    from capflow_models.experiment.session import check_status, is_accepted

    with running_hub(f"ipc://{tmp_path}/hub.sock") as one:
        status = one.status()
        assert not is_accepted(status, "mine")
        check_status(status)
    worker = {"role": "worker", "engine": "mine"}
    joined = status | {"sessions": [worker, {"role": "scheduler", "engine": "other"}]}
    assert is_accepted(joined, "mine")
    assert not is_accepted(joined, "other")
    with pytest.raises(CapflowError, match="the hub: got engine mine: gate@x failed, expected gates"):
        check_status(joined | {"problems": ["engine mine: gate@x failed"]})


def test_a_row_of_nan_is_not_near_the_reference_and_an_excluded_token_adds_nothing():
    import torch

    from capflow_engine.compat.forced import divergence

    row = torch.log_softmax(torch.tensor([0.0, 1.0, -torch.inf]), -1)
    other = torch.log_softmax(torch.tensor([1.0, 0.0, 0.0]), -1)
    assert np.isnan(divergence(row, torch.full((3,), torch.nan)))
    assert np.isnan(divergence(torch.full((3,), torch.nan), row))
    assert divergence(row, row) == 0.0
    expected = sum(float(row[n].exp() * (row[n] - other[n])) for n in range(2))
    assert divergence(row, other) == pytest.approx(expected)
    assert divergence(other, row) == np.inf


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_run_that_was_killed_continues_with_the_missing_cells(directory):
    out = directory / "killed"
    path = write(directory, "killed.toml", "[arms.baseline]\n[arms.always_on]\n")
    job = json.dumps({"file": str(path), "out": str(out)})
    process = subprocess.Popen([sys.executable, "-m", "capflow_models.experiment.program", job], start_new_session=True)
    cells = out / "cells.jsonl"
    try:
        eventually(lambda: cells.exists() and b"\n" in cells.read_bytes(), 240)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, left = psutil.wait_procs(children, timeout=30)
        assert children
        assert not left, "processes of a killed run still live"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = cells.read_bytes()[: cells.read_bytes().rindex(b"\n") + 1]
    with cells.open("ab") as file:
        file.write(b'{"arm": "base')
    assert 0 < kept.count(b"\n") < 48
    run(path, out)
    lines = cells.read_bytes()
    assert lines.startswith(kept)
    assert lines.count(b"\n") == 48
    keys = [
        tuple(json.loads(line)[name] for name in ("arm", "scale", "prompt_id", "seed")) for line in lines.splitlines()
    ]
    assert len(set(keys)) == 48


def test_a_dry_run_shows_cells_tokens_and_the_time_that_it_knows(directory, finished, capsys):
    run(directory / "experiment.toml", directory / "nowhere", dry_run=True)
    shown = capsys.readouterr().out
    assert "160 answers to 8 prompts; at most 1920 generated tokens in 2 passes (answer, forced)" in shown
    assert "the time is unknown: --calibrate starts the engine" in shown
    assert not (directory / "nowhere").exists()
    run(directory / "experiment.toml", finished, dry_run=True)
    shown = capsys.readouterr().out
    assert "160 of 160 answers already exist in" in shown
    assert "nothing is left to answer" in shown
    more = write(directory, "more.toml", ARMS + '[arms.twice]\nkind = "always_on"\nscale = [3.0]\n')
    run(more, finished, dry_run=True)
    shown = capsys.readouterr().out
    assert "160 of 176 answers already exist in" in shown
    assert "tokens/s of the answers there" in shown
    more.write_text(more.read_text().replace('fit = "texts.csv"\nlayer = 1', 'fit = "texts.csv"\nlayer = 0'))
    with pytest.raises(UsageError, match=r"probe\.layer: got 0, expected 1"):
        run(more, finished, dry_run=True)


def test_a_dry_run_can_time_a_batch_for_the_present_directory_too(directory, capsys, monkeypatch):
    monkeypatch.chdir(directory)
    before = set(directory.iterdir())
    run(write(directory, "experiment.toml", ARMS), ".", dry_run=True, calibrate=True)
    assert "after the start" in capsys.readouterr().out
    assert set(directory.iterdir()) == before | {directory / "experiment.toml"}
