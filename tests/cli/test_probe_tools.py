"""`capflow probe`: fitted and judged on what a real engine captured."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import capflow
from capflow.capture.frame import Frame
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.cli.probe.command import probe
from capflow.errors import CapflowError, UsageError
from capflow.probes.labels import read_labels
from capflow.probes.probe import Probe, save_vector
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from capflow_consumers.gate import Gate, GateConfig
from tests.kit.frames import make_frame

SITE = Site(0, "post_block")
GROUPS = {"low": range(5, 9), "high": range(9, 13)}  # of token ids
REQUESTS = 48


def run(*arguments):
    """Run `capflow probe` in this process; return what it printed."""
    done = CliRunner().invoke(probe, [str(a) for a in arguments], catch_exceptions=False, standalone_mode=False)
    return done.output


def label_file(path, labels):
    path.write_text("".join(json.dumps({"request": r, "label": label}) + "\n" for r, label in labels.items()))
    return path


# The files of labels.


def test_labels_are_read_from_json_lines_and_csv(tmp_path):
    lines = label_file(tmp_path / "l.jsonl", {"a": 1, "b": 0, "c": True, "d": "0"} | {"c": 1})
    assert read_labels(lines, None) == {"a": True, "b": False, "c": True, "d": False}
    table = tmp_path / "l.csv"
    table.write_text('request,label\n"a, b",Sad\nc,glad\n')
    assert read_labels(table, "glad") == {"a, b": False, "c": True}
    assert read_labels(table, "SAD") == {"a, b": True, "c": False}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.txt", "", "--labels: got .*l.txt, expected a file named .csv or .jsonl"),
        ("l.jsonl", "", "labels: got none, expected two different ones or more"),
        ("l.jsonl", "[1]", "l.jsonl: line 1: got .*expected a request and a label"),
        ("l.jsonl", '{"request": "a", "label": 1}\n{', "line 2: got {, expected a request and a label"),
        ("l.jsonl", "[" * 100_000, "line 1: got"),
        ("l.jsonl", '{"request": "a", "label": 1, "x": 1}', "line 1: got .*expected a request and a label"),
        ("l.jsonl", '{"request": "a", "label": null}', "line 1: got .*expected a request and a label"),
        ("l.jsonl", '{"request": "a", "label": 1}\n{"request": "a", "label": 0}', "line 2: got another label of a"),
        ("l.csv", "request,label\na,1\nb\n", "line 3: got .*expected a request and a label"),
        ("l.csv", "id,label\na,1\n", "line 2: got .*expected a request and a label"),
        ("l.csv", "request,label\na,x\nb,x\n", "labels: got x, expected two different ones or more"),
        (
            "l.csv",
            "request,label\na,x\nb,y\nc,1\n",
            "--positive: got nothing, expected one of 1, x, y; name what the probe",
        ),
        ("l.csv", "request,label\na,x\nb,y\n", "--positive: got nothing, expected one of x, y; name what the probe"),
        ("l.csv", "request,label\na,\xff\n", "expected a file of labels in UTF-8"),
    ],
)
def test_a_file_that_holds_no_labels_is_refused_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        read_labels(tmp_path / name, None)


def test_a_label_to_fire_on_is_held_against_all_others(tmp_path):
    several = label_file(tmp_path / "l.jsonl", {"a": "glad", "b": "Sad", "c": "calm", "d": "GLAD"})
    assert read_labels(several, "Glad") == {"a": True, "b": False, "c": False, "d": True}
    assert read_labels(several, "sad") == {"a": False, "b": True, "c": False, "d": False}
    with pytest.raises(UsageError, match=r"^--positive: got nose, expected one of calm, glad, sad; name what"):
        read_labels(several, "nose")


def test_a_label_to_fire_on_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--positive: got nose, expected one of 0, 1"):
        read_labels(label_file(tmp_path / "l.jsonl", {"a": 1, "b": 0}), "nose")


def test_without_scikit_learn_it_says_what_to_install(tmp_path):
    script = (
        "import importlib.machinery, sys\n"
        "original = importlib.machinery.PathFinder.find_spec\n"
        "def find(name, path=None, target=None):\n"
        "    return None if name.partition('.')[0] == 'sklearn' else original(name, path, target)\n"
        "importlib.machinery.PathFinder.find_spec = find\n"
        "from capflow.cli import main\n"
        "main()\n"
    )
    command = ["probe", "fit", str(tmp_path), "--labels", "l.csv", "--site", "post_block:2", "--out", "p.safetensors"]
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "capflow: capflow probe fit: missing package scikit-learn; pip install 'capflow[probe]'\n",
    )


# On rows that are no numbers, and disks that take none.


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Two data sets of 12 requests: one has a row with NaN, the other has numbers whose scores overflow."""
    root = tmp_path_factory.mktemp("odd")
    rng = np.random.default_rng(0)
    for name, hurt in (("nan", np.nan), ("large", 3e38)):
        consumer = FilesystemConsumer(FilesystemConfig(str(root / name), fsync=False))
        consumer.open(None)
        for seq in range(12):
            header = make_frame([(f"r{seq}", 4, 0, 4)], [SITE], seq=seq + 1).header
            rows = (rng.normal(size=(4, 8)) + (seq % 2)).astype(np.float32)
            if seq == 7:
                rows[2] = hurt
            consumer.on_frame(Frame.seal(header, rows.reshape(-1).view(np.uint8)))
            consumer.on_request_done(RequestDone("engine-1", f"r{seq}", "stop", 4, 4, 4, 4, ()))
        consumer.close()
    label_file(root / "labels.jsonl", {f"r{seq}": seq % 2 for seq in range(12)})
    return root


def test_rows_that_are_no_numbers_are_named_wherever_they_come(odd, tmp_path):
    out = tmp_path / "p.safetensors"
    message = (
        "captured rows: got NaN or infinity at position 2 of request r7, expected finite numbers; leave the request"
    )
    labels = ["--labels", odd / "labels.jsonl"]
    site = ["--site", SITE, "--out", out, "--held-out", 0.5]
    for seed in range(6):  # r7 is fitted in some and held out in others
        with pytest.raises(UsageError, match=message):
            run("fit", odd / "nan", *labels, *site, "--seed", seed)
    assert not out.exists()
    run("fit", odd / "nan", *labels, *site, "--positions", "0+1")
    for pool in ("token", "last"):
        Probe.make(SITE, np.zeros(8), pool=pool).save(out)
        with pytest.raises(UsageError, match=message):
            run("eval", odd / "nan", out, *labels)


def test_scores_that_are_no_numbers_are_named(odd, tmp_path):
    out = tmp_path / "p.safetensors"
    Probe.make(SITE, np.ones(8)).save(out)
    with pytest.raises(UsageError, match="scores: got NaN or infinity at position 2 of request r7, expected finite"):
        run("eval", odd / "large", out, "--labels", odd / "labels.jsonl")


def test_a_probe_that_cannot_be_written_leaves_what_was_there(odd, tmp_path, monkeypatch):
    out = tmp_path / "p.safetensors"
    arguments = ["fit", odd / "nan", "--labels", odd / "labels.jsonl", "--site", SITE, "--positions", "0+1"]
    run(*arguments, "--out", out)
    before = out.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapflowError, match=r"p\.safetensors cannot be written: got No space left on device"):
        run(*arguments, "--out", out, "--method", "mean")
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
    monkeypatch.undo()
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(CapflowError, match=r"d\.safetensors cannot be written: got Is a directory"):
        run(*arguments, "--out", tmp_path / "d.safetensors")
    assert len(list(tmp_path.iterdir())) == 2


# On captures.


@pytest.fixture(scope="module")
def captured(tiny, tmp_path_factory):
    """A data set of requests whose prompts are of one group of tokens each, and its labels."""
    from tests.kit.engines import GREEDY, engine

    root = tmp_path_factory.mktemp("captured")
    rng = np.random.default_rng(0)
    with engine(tiny, consumers=[f"filesystem:root={root / 'rows'},capture=requests"]) as llm:
        capture = {"hooks": {SITE.hook: [SITE.layer]}, "positions": "all_prompt"}
        ids = [f"{group}-{n}" for n in range(REQUESTS // 2) for group in GROUPS]
        prompts = [
            {"prompt_token_ids": rng.choice(GROUPS[i.partition("-")[0]], rng.integers(9, 20)).tolist()} for i in ids
        ]
        params = [capflow.sampling_params(id=i, capture=capture, **{**GREEDY, "max_tokens": 1}) for i in ids]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert {o.capture_results["filesystem"].status for o in outputs} == {"ok"}
    label_file(root / "labels.jsonl", {i: i.partition("-")[0] for i in ids})
    with (root / "labels.csv").open("w") as file:
        csv.writer(file).writerows([("request", "label"), *((i, int(i.startswith("high"))) for i in ids)])
    return root


def held_out(output):
    return {name: float(value) for name, value in re.findall(r"(accuracy|AUROC) ([\d.]+)", output)}


@pytest.mark.engine
@pytest.mark.parametrize("method", ["logistic", "mean"])
@pytest.mark.parametrize("pool", ["token", "mean", "max", "last"])
def test_a_probe_tells_requests_apart_that_it_was_not_fitted_on(captured, tmp_path, method, pool):
    out = tmp_path / "high.safetensors"
    options = ["--labels", captured / "labels.csv", "--site", SITE, "--out", out, "--method", method, "--pool", pool]
    output = run("fit", captured / "rows", *options, "--held-out", "0.5")
    counted = f"of {REQUESTS // 2} requests" if pool == "token" else f"held out: {REQUESTS // 2} requests"
    assert counted in output
    assert held_out(output)["AUROC"] > (0.95 if pool == "token" else 0.9)
    probe = Probe.load(out)
    assert (probe.names, probe.pool, probe.site, probe.thresholds) == (("high",), pool, SITE, (0.0,))

    data = capflow.open(captured / "rows")
    means = {g: np.concatenate([probe.scores(data[f"{g}-{n}"][SITE].rows) for n in range(3)]).mean() for g in GROUPS}
    assert means["high"] > means["low"]


@pytest.mark.engine
def test_eval_says_of_a_fitted_probe_what_its_scores_say(captured, tmp_path):
    from sklearn.metrics import roc_auc_score

    out = tmp_path / "p.safetensors"
    common = ["--labels", captured / "labels.jsonl", "--positive", "low"]
    run("fit", captured / "rows", *common, "--site", SITE, "--out", out, "--name", "is-low", "--method", "mean")
    (line,) = run("eval", captured / "rows", out, *common, "--json").splitlines()
    report = json.loads(line)
    data = capflow.open(captured / "rows")
    ids = sorted(data.requests())
    scores = [Probe.load(out).scores(np.asarray(data[i][SITE].rows))[:, 0] for i in ids]
    labels = np.repeat([i.startswith("low") for i in ids], [len(s) for s in scores])
    together = np.concatenate(scores)
    assert (report["probe"], report["pool"], report["requests"]) == ("is-low", "token", REQUESTS)
    assert (report["judged"], report["positive"]) == (len(labels), labels.sum())
    assert report["accuracy"] == pytest.approx(((together >= 0) == labels).mean())
    assert report["auroc"] == pytest.approx(roc_auc_score(labels, together))
    last = json.loads(run("eval", captured / "rows", out, *common, "--json", "--positions", "-1"))
    assert last["judged"] == REQUESTS


@pytest.mark.engine
def test_the_same_seed_holds_out_the_same_requests(captured, tmp_path):
    options = ["--labels", captured / "labels.csv", "--site", SITE, "--json"]
    files = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        run("fit", captured / "rows", *options, "--out", file, "--seed", seed, "--name", "p")
    first, again, other = (Probe.load(file).weight.tobytes() for file in files)
    assert first == again != other


@pytest.mark.engine
def test_what_is_fitted_is_for_the_store_the_gate_and_the_dashboard(captured, tmp_path):
    from capflow_dashboard.consumer import Dashboard, DashboardConfig

    out = tmp_path / "p.safetensors"
    run("fit", captured / "rows", "--labels", captured / "labels.csv", "--site", SITE, "--out", out)
    save_vector(tmp_path / "v.safetensors", SITE, np.ones(64))
    DuckdbConsumer(DuckdbConfig(str(tmp_path / "s.duckdb"), probes=[str(out)])).check()
    assert Gate.load(GateConfig(str(out), str(tmp_path / "v.safetensors"))).threshold == 0.0
    Dashboard(DashboardConfig(probes=(str(out),))).check()


@pytest.mark.engine
def test_what_cannot_be_fitted_or_judged_is_said(captured, tmp_path):
    out = tmp_path / "p.safetensors"
    labels = captured / "labels.csv"
    few = label_file(tmp_path / "few.jsonl", {"high-0": 1, "low-0": 0, "low-1": 0})
    other = label_file(tmp_path / "other.jsonl", {"x": 1, "y": 0})
    one = label_file(tmp_path / "one.jsonl", {"high-0": 1, "high-1": 1, "gone": 0})
    rows = captured / "rows"
    for arguments, message in (
        (["fit", rows, "--labels", few, "--site", SITE, "--out", out], "got 1 requests of the positive label and 2 of"),
        (["fit", rows, "--labels", other, "--site", SITE, "--out", out], "got none, expected rows at post_block:0 of"),
        (["fit", rows, "--labels", one, "--site", SITE, "--out", out], "got 2 requests of the positive label and 0 of"),
        (["fit", rows, "--labels", labels, "--site", "post_block:3", "--out", out], "got none, expected rows at post_"),
        (["fit", rows, "--labels", labels, "--site", "nose:3", "--out", out], "site: got nose:3"),
        (["fit", rows, "--labels", labels, "--site", SITE, "--out", tmp_path], "--out: got "),
        (["fit", rows, "--labels", labels, "--site", SITE, "--out", out, "--held-out", "0.99"], "--held-out: got 0.99"),
        (["fit", rows, "--labels", labels, "--site", SITE, "--out", out, "--positions", "x"], "--positions: got x"),
        (["fit", tmp_path, "--labels", labels, "--site", SITE, "--out", out], "is not a captured data set"),
        (["eval", rows, tmp_path / "no", "--labels", labels], "no: got no such file"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            run(*arguments)
    assert not out.exists()
    Probe.make(SITE, np.ones(8)).save(out)
    with pytest.raises(UsageError, match="weight: got 8 numbers, expected 64, as "):
        run("eval", rows, out, "--labels", labels)
