"""Tables about vectors: lengths, angles and projections, against NumPy and scikit-learn in float64."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics.pairwise import cosine_similarity

import capflow.cli.engine.become
from capflow.capture.frame import Frame
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.cli.engine.vectors import vectors
from capflow.errors import UsageError
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from capflow_models import save_vectors
from capflow_models.jobs.vectorjob import VectorJob, work
from capflow_models.vectors.tables import Projections
from tests.kit.engines import WIDTH, save_tiny, save_words
from tests.kit.frames import make_frame

RNG = np.random.default_rng(11)
A, B, C = ({layer: RNG.normal(size=8).astype(np.float32) for layer in layers} for layers in ((0, 1, 2), (1, 2), (5,)))
SITE = Site(1, "post_block")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, each in (("a", A), ("b", B), ("c", C)):
        save_vectors(f"{name}.safetensors", each)
    return [f"{name}.safetensors" for name in "abc"]


def lines(capsys, job):
    work(job)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_norms_are_by_layer(files, capsys):
    table = lines(capsys, VectorJob("norms", files[:2], as_json=True))
    assert [(row["file"], row["site"]) for row in table] == [
        *(("a.safetensors", f"post_block:{n}") for n in A),
        *(("b.safetensors", f"post_block:{n}") for n in B),
    ]
    every = np.stack([*A.values(), *B.values()]).astype(np.float64)
    assert [row["norm"] for row in table] == pytest.approx(np.linalg.norm(every, axis=1), rel=1e-12)
    assert [row["largest"] for row in table] == pytest.approx(np.abs(every).max(1), rel=1e-12)


def test_cosines_are_scikit_learns(files, capsys):
    def expected(one, other):
        return cosine_similarity(one[None].astype(np.float64), other[None].astype(np.float64))[0, 0]

    alone = lines(capsys, VectorJob("cosine", files[:1], as_json=True))
    assert [row["cosine"] for row in alone] == pytest.approx(
        [expected(A[i], A[j]) for i, j in ((0, 1), (0, 2), (1, 2))], abs=1e-12
    )
    both = lines(capsys, VectorJob("cosine", files[:2], as_json=True))
    assert [(row["site"], row["other_site"]) for row in both] == [(f"post_block:{n}",) * 2 for n in (1, 2)]
    assert [row["cosine"] for row in both] == pytest.approx([expected(A[n], B[n]) for n in (1, 2)], abs=1e-12)
    assert len(lines(capsys, VectorJob("cosine", files, as_json=True, everything=True))) == 15


def test_what_cannot_be_compared_is_refused(files):
    with pytest.raises(UsageError, match=r"cosine: got no site that two files have.*; --all compares"):
        work(VectorJob("cosine", [files[0], files[2]]))
    with pytest.raises(UsageError, match=r"cosine: got one vector, expected vectors to compare$"):
        work(VectorJob("cosine", files[2:]))
    save_vectors("wide.safetensors", {1: np.ones(9)})
    with pytest.raises(UsageError, match=r"wide.safetensors: post_block:1: got 9 numbers, expected 8, as the other"):
        work(VectorJob("cosine", [files[0], "wide.safetensors"]))
    save_vectors("zero.safetensors", {1: np.zeros(8)})
    with pytest.raises(UsageError, match=r"zero.safetensors: post_block:1: got a vector of zeros"):
        work(VectorJob("project", ["zero.safetensors"], data="rows"))


def test_a_table_is_aligned_and_a_zero_vector_has_no_angle(files, capsys):
    save_vectors("zero.safetensors", {1: np.zeros(8)})
    work(VectorJob("cosine", [files[0], "zero.safetensors"]))
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "site", "other", "file", "other", "site", "cosine"]
    assert line.split() == ["a.safetensors", "post_block:1", "zero.safetensors", "post_block:1", "-"]
    assert head.index("other site") == line.index("post_block:1", 30)


@pytest.fixture
def captured(tmp_path):
    """A data set of six requests with four rows each, and its rows by request."""
    consumer = FilesystemConsumer(FilesystemConfig(str(tmp_path / "rows"), fsync=False))
    consumer.open(None)
    rows = {}
    for seq in range(6):
        header = make_frame([(f"r{seq}", 4, 0, 4)], [SITE], seq=seq + 1).header
        rows[f"r{seq}"] = (RNG.normal(size=(4, 8)) + seq).astype(np.float32)
        consumer.on_frame(Frame.seal(header, rows[f"r{seq}"].reshape(-1).view(np.uint8)))
        consumer.on_request_done(RequestDone("engine-1", f"r{seq}", "stop", 4, 4, 4, 4, ()))
    consumer.close()
    return rows


def of_group(rows, vector):
    wide, v = rows.astype(np.float64), vector.astype(np.float64)
    along = wide @ v / np.linalg.norm(v)
    return along.mean(), along.std(), cosine_similarity(wide, v[None]).mean()


@pytest.mark.parametrize("positions", ["all", "last_prompt", "0+2"])
def test_captured_rows_are_projected_by_group(files, captured, capsys, positions):
    names = {f"r{n}": "Odd" if n % 2 else "even" for n in range(5)}
    with Path("labels.csv").open("w") as file:
        file.write("request,label\n" + "".join(f"{name},{label}\n" for name, label in names.items()))
    save_vectors("one.safetensors", {1: A[1]})
    job = VectorJob("project", ["one.safetensors"], data="rows", labels="labels.csv", positions=positions, as_json=True)
    table = lines(capsys, job)
    places = {"all": [0, 1, 2, 3], "last_prompt": [3], "0+2": [0, 2]}[positions]
    assert [(row["group"], row["rows"]) for row in table] == [("even", 3 * len(places)), ("odd", 2 * len(places))]
    for row in table:
        group = [captured[name][places] for name, label in names.items() if label.lower() == row["group"]]
        expected = of_group(np.concatenate(group), A[1])
        assert (row["mean"], row["std"], row["cosine"]) == pytest.approx(expected, rel=1e-9)
    (whole,) = lines(capsys, VectorJob("project", ["one.safetensors"], data="rows", as_json=True))
    assert (whole["group"], whole["rows"]) == ("all", 24)


def test_rows_that_do_not_fit_are_named(files, captured):
    with pytest.raises(
        UsageError, match="--data rows: got rows at post_block:1, expected rows at post_block:0, post_b"
    ):
        work(VectorJob("project", files[:1], data="rows"))
    save_vectors("wide.safetensors", {1: np.ones(9)})
    with pytest.raises(UsageError, match=r"wide.safetensors: post_block:1: got 9 numbers, expected 8, as request r"):
        work(VectorJob("project", ["wide.safetensors"], data="rows"))
    projections = Projections({"v": {SITE: A[1]}})
    with pytest.raises(UsageError, match="request x: post_block:1: got NaN or infinity, expected finite rows"):
        projections.add(SITE, np.full((2, 8), np.nan, np.float32), "all", "request x")


def test_rows_of_any_dtype_are_projected_in_float64():
    projections = Projections({"v": {SITE: A[1]}})
    rows = RNG.normal(size=(50, 8)).astype(ml_dtypes.bfloat16)
    projections.add(SITE, rows[:20], "all", "x")
    projections.add(SITE, rows[20:], "all", "x")
    (row,) = projections.table()
    assert (row.mean, row.std, row.cosine) == pytest.approx(of_group(rows.astype(np.float64), A[1]), rel=1e-12)


def test_prompts_are_projected_at_their_last_tokens(tmp_path, monkeypatch, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    save_words(tmp_path)
    tiny = save_tiny(tmp_path)
    vector = RNG.normal(size=WIDTH).astype(np.float32)
    save_vectors("v.safetensors", {1: vector})
    pairs = [(f"w{n} w{n + 50}", f"w{n + 90}") for n in range(5, 11)]
    with Path("pairs.jsonl").open("w") as file:
        file.writelines(json.dumps({"positive": p, "negative": n}) + "\n" for p, n in pairs)
    with Path("prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": text, "group": name}) + "\n" for pair in pairs
                        for text, name in zip(pair, ("positive", "negative"), strict=True))  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny)
    last = {}
    for side, name in enumerate(("positive", "negative")):
        ids = [torch.tensor([[int(word[1:]) for word in pair[side].split()]]) for pair in pairs]
        with torch.no_grad():
            states = [model(each, output_hidden_states=True).hidden_states[2][0, -1].numpy() for each in ids]
        last[name] = np.stack(states)
    common = {"model": tiny, "backend": "transformers", "arguments": {"dtype": "float32"}, "as_json": True}
    for source in ({"pairs": "pairs.jsonl"}, {"prompts": "prompts.jsonl"}):
        table = lines(capsys, VectorJob("project", ["v.safetensors"], **source, **common))
        assert [(row["group"], row["rows"]) for row in table] == [("negative", 6), ("positive", 6)]
        for row in table:
            expected = of_group(last[row["group"]], vector)
            assert (row["mean"], row["std"], row["cosine"]) == pytest.approx(expected, abs=1e-4)
    save_vectors("far.safetensors", {17: vector})
    with pytest.raises(
        UsageError, match=r"^far.safetensors: got post_block:17, expected a site of a layer of .*, 0..3$"
    ):
        work(VectorJob("project", ["far.safetensors"], pairs="pairs.jsonl", **common))
    save_vectors("heads.safetensors", {1: vector}, hook="heads")
    with pytest.raises(UsageError, match=r"^heads.safetensors: heads:1: expected a site of "):
        work(VectorJob("project", ["heads.safetensors"], pairs="pairs.jsonl", **common))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--model", "m", "--out", "o"], "--pairs, --caa, --texts: got none, expected one of them"),
        (["fit", "--model", "m", "--out", "o", "--pairs", "p", "--caa", "c"], "got --pairs and --caa, expected one"),
        (["fit", "--model", "m", "--out", "o", "--pairs", "p", "--positive-template", "t"], "expected --texts beside"),
        (["sae", "s", "--out", "o", "--feature", "x"], "--feature: got x, expected NUMBER or NUMBER=COEFFICIENT"),
        (["sae", "s", "--out", "o", "--feature", "1=nan"], "--feature: got 1=nan"),
        (["sae", "s", "--out", "o", "--feature", "1", "--feature", "1=2"], "--feature: got 1=2"),
        (["project", "v"], "--data, --prompts, --pairs: got none, expected one of them"),
        (["project", "v", "--pairs", "p"], "--model: got none, expected a model, which reads the prompts"),
        (["project", "v", "--data", "d", "--model", "m"], "--model: got m, expected none beside --data"),
        (["project", "v", "--pairs", "p", "--model", "m", "--labels", "l"], "--labels: got l, expected --data beside"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(words, message):
    result = CliRunner().invoke(vectors, words)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_the_command_gives_its_job_what_the_options_say(monkeypatch):
    jobs = []
    monkeypatch.setattr(capflow.cli.engine.become, "become", lambda module, job: jobs.append((module, job)))
    words = ["sae", "s@post_block:1", "--out", "o.safetensors", "--feature", "17=4", "--feature", "9"]
    assert CliRunner().invoke(vectors, words).exit_code == 0
    (module, job) = jobs.pop()
    assert module == "capflow_models.jobs.vectorjob"
    assert (job["task"], job["files"], job["features"]) == ("sae", ["s@post_block:1"], {17: 4.0, 9: 1.0})
