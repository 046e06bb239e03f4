"""Judges of rollouts, against plain Transformers in float64, and the scores in files."""

import contextlib
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import capflow
from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError
from capflow.probes.kinds import load_probe
from capflow.probes.probe import Probe
from capflow_models import LayerSteeringSpec, SteeringSpec, TransformersSteerableModel, save_vectors
from capflow_models.jobs import rolloutjob
from capflow_models.jobs.rolloutjob import RolloutJob, run
from capflow_models.rollouts.judges import answer_tokens, parse_judges
from tests.kit.engines import WIDTH, engine, save_tiny, save_words

RNG = np.random.default_rng(3)
SITE = Site(1, "post_block")
TEXTS = [("w5 w60 w120", " w7 w8"), ("w9", " w10"), ("w11 w12", ""), ("w11 w12", " w200 w13 w14 w299")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_words(directory)
    return save_tiny(directory)


@pytest.fixture(scope="module")
def model(tiny):
    return TransformersSteerableModel(tiny, dtype="float32")


@pytest.fixture(scope="module")
def exact(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)


def ids_of(text):
    return [int(word[1:]) for word in text.split()]


def read(exact, prompt, text):
    """Return the log probabilities of the answer's tokens, and the stream at them, in float64."""
    ids, start = ids_of(prompt + text), len(ids_of(prompt))
    with torch.no_grad():
        output = exact(torch.tensor([ids]), output_hidden_states=True)
    logprobs = output.logits[0].log_softmax(-1)
    each = [float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids))]
    return np.array(each), output.hidden_states[SITE.layer + 1][0, start:].numpy()


def probe_file(path, pool="token", count=1):
    weight = RNG.normal(size=(count, WIDTH))
    probe = Probe.make(SITE, weight, RNG.normal(size=count), names=[f"p{n}" for n in range(count)], pool=pool)
    probe.save(path)
    return probe


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.engine)])
def test_a_model_judges_as_transformers_does(exact, model, tiny, tmp_path, backend):
    probes = {pool: probe_file(tmp_path / f"{pool}.safetensors", pool, 2) for pool in ("token", "mean", "max", "last")}
    judges = parse_judges(["perplexity", *(f"{pool}=probe:{tmp_path / pool}.safetensors" for pool in probes)])
    vector = 5 * RNG.normal(size=WIDTH)  # judges read without it
    if backend == "transformers":
        with model.steering(SteeringSpec({1: LayerSteeringSpec(vector)})):
            scores = [judge.scores(model, TEXTS) for judge in judges]
    else:
        from capflow_models import VLLMSteerableModel

        keeper = f"filesystem:root={tmp_path / 'rows'},capture=requests"
        with engine(tiny, consumers=[keeper], skip_tokenizer_init=False) as llm:
            served = VLLMSteerableModel(llm, rows=tmp_path / "rows")
            served.set_layer_vector(1, vector)
            scores = [judge.scores(served, TEXTS) for judge in judges]
            full = "w9", " w10" * (served.length_max - 1)  # it leaves no room for the token that vLLM makes
            for judge in judges:
                assert judge.scores(served, [full]) == [dict.fromkeys(judge.columns)]
    for number, (prompt, text) in enumerate(TEXTS):
        logprobs, rows = read(exact, prompt, text)
        (perplexity, *pooled) = [each[number] for each in scores]
        if not text:
            assert perplexity == {"perplexity": None}
            assert pooled == [{f"{pool}.p0": None, f"{pool}.p1": None} for pool in probes]
            continue
        assert perplexity["perplexity"] == pytest.approx(np.exp(-logprobs.mean()), rel=1e-4)
        for (pool, probe), ours in zip(probes.items(), pooled, strict=True):
            every = rows @ probe.weight.astype(np.float64).T + probe.bias
            expected = {"max": every.max(0), "last": every[-1]}.get(pool, every.mean(0))
            assert [ours[f"{pool}.p0"], ours[f"{pool}.p1"]] == pytest.approx(expected.tolist(), abs=1e-3)


def test_the_answer_begins_where_the_tokens_of_the_prompt_end():
    class Merging:
        """A tokenizer that joins `a` and `b`."""

        def token_ids(self, text):
            return [{"a": 1, "b": 2, "ab": 3, "c": 4}[each] for each in re.findall("ab|.", text)]

    assert answer_tokens(Merging(), "ca", "c") == ([4, 1, 4], 2)
    assert answer_tokens(Merging(), "ca", "bc") == ([4, 3, 4], 1)
    assert answer_tokens(Merging(), "a", "bc") == ([3, 4], 1)
    assert answer_tokens(Merging(), "ca", "") == ([4, 1], 2)


def test_texts_are_judged_without_a_model(tmp_path, monkeypatch):
    (tmp_path / "my_judges.py").write_text(
        "def share(prompt, text):\n    return len(text) / len(prompt)\n"
        "def fails(prompt, text):\n    raise KeyError('x')\n"
        "def nothing(prompt, text):\n    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judges = parse_judges(
        ["sorry=regex:(?i)SORRY|=", "share=function:my_judges:share", "nan=function:my_judges:nothing"]
    )
    texts = [("ab", "I am sorry"), ("abcd", "fine"), ("x", "a=b")]
    assert judges[0].scores(None, texts) == [{"sorry": 1.0}, {"sorry": 0.0}, {"sorry": 1.0}]
    assert judges[1].scores(None, texts) == [{"share": 5.0}, {"share": 1.0}, {"share": 3.0}]
    assert judges[2].scores(None, texts[:1]) == [{"nan": None}]
    assert len({judge.digest for judge in judges}) == 3
    (failing,) = parse_judges(["function:my_judges:fails"])
    with pytest.raises(CapflowError, match="judge function: got KeyError: 'x', for the answer 'fine', expected a numb"):
        failing.scores(None, [("ab", "fine")])


@pytest.mark.parametrize(
    ("judges", "message"),
    [
        (["likes"], "--judge: got likes, expected [NAME=]probe:FILE, regex:PATTERN"),
        (["regex"], "--judge: got regex, expected [NAME=]probe"),
        (["perplexity:x"], "--judge: got perplexity:x, expected"),
        (["1=regex:a"], "--judge: got 1=regex:a, expected"),
        (["regex:("], "--judge regex: got (: missing ), unterminated subpattern"),
        (["regex:a", "regex:b"], "--judge: got regex twice, expected each name once; give names: NAME=…"),
        (["probe:nowhere.safetensors"], "nowhere.safetensors: got no such file"),
        (["function:os"], "--judge function: got os, expected module:function"),
        (["function:no_such:f"], "--judge function: got no_such:f: ModuleNotFoundError"),
        (["function:os:sep"], "--judge function: got os:sep, a str, expected a function"),
    ],
)
def test_a_judge_that_is_none_is_refused(judges, message):
    with pytest.raises(UsageError) as raised:
        parse_judges(judges)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


# Files.


@pytest.fixture
def job(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"id": f"p{n}", "prompt": f"w{n + 5} w{n + 60}"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_vectors("v.safetensors", {1: 4 * RNG.normal(size=WIDTH)})
    probe_file("glad.safetensors")
    return RolloutJob(
        tiny, "transformers", "prompts.jsonl", "out.jsonl", [0.0, 2.0], {"v": "v.safetensors"}, max_new_tokens=4
    )


def rows(path="out.jsonl"):
    return [json.loads(line) for line in open(path)]  # noqa: PTH123


JUDGES = ["fluent=perplexity", "glad=probe:glad.safetensors", "one=regex:w1"]


def test_rows_are_judged_when_they_are_made_or_later(job, exact, capsys, monkeypatch):
    run(msgspec.structs.replace(job, judges=JUDGES))
    at_once = rows()
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["vector", "scale", "answers"], ["none", "0", "3"], ["v", "2", "3"],
    ]  # fmt: skip
    for row in at_once:
        logprobs, at = read(exact, row["prompt"], row["text"])
        assert row["scores"]["fluent"] == pytest.approx(np.exp(-logprobs.mean()), rel=1e-3)
        expected = load_probe("glad.safetensors").scores(at.astype(np.float32)).mean()
        assert row["scores"]["glad"] == pytest.approx(expected, abs=1e-3)
        assert row["scores"]["one"] == float("w1" in row["text"])
    means = [np.mean([row["scores"]["fluent"] for row in at_once if row["vector"] == name]) for name in ("none", "v")]
    assert [float(line.split()[3]) for line in shown[1:]] == pytest.approx(means, abs=1e-4)

    run(msgspec.structs.replace(job, out="later.jsonl"))
    assert not any("scores" in row for row in rows("later.jsonl"))
    run(msgspec.structs.replace(job, out="later.jsonl", judges=JUDGES[:1]))
    assert [set(row["scores"]) for row in rows("later.jsonl")] == [{"fluent"}] * 6
    run(msgspec.structs.replace(job, out="later.jsonl", judges=JUDGES))
    assert rows("later.jsonl") == at_once

    monkeypatch.setattr(rolloutjob, "open_model", None)  # no model is needed any more
    run(msgspec.structs.replace(job, judges=[*JUDGES, "two=regex:w2"]))
    assert [{key: value for key, value in row["scores"].items() if key != "two"} for row in rows()] == [
        row["scores"] for row in at_once
    ]
    with pytest.raises(UsageError, match=r"out.jsonl: prompt p0: got scores of another judge one, a regex, expected"):
        run(msgspec.structs.replace(job, judges=["one=regex:w3"]))
    before = rows()
    run(job)
    assert rows() == before


def test_parquet_has_the_scores(job):
    run(msgspec.structs.replace(job, out="out.parquet", judges=JUDGES[2:]))
    lines = (job.prompts, '{"id": "p9", "prompt": "w50"}\n')
    with open(lines[0], "a") as file:  # noqa: PTH123
        file.write(lines[1])
    run(msgspec.structs.replace(job, out="out.parquet"))
    run(msgspec.structs.replace(job, out="out.parquet", judges=["two=regex:w2"]))
    table = pq.read_table("out.parquet").to_pylist()
    assert [row["scores"]["one"] for row in table] == [float("w1" in row["text"]) for row in table[:6]] + [None, None]
    assert [row["scores"]["two"] for row in table] == [float("w2" in row["text"]) for row in table]
    assert [row["judges"]["one"] is None for row in table] == [False] * 6 + [True] * 2

    other = msgspec.structs.replace(job, out="out.parquet", scales=[0.0], seed=7)
    with pytest.raises(UsageError, match=r"^out.parquet: prompt p0, .*; write to another file, or remove this one$"):
        run(other)
    Path("out.parquet").unlink()
    run(other)
    assert {row["seed"] for row in pq.read_table("out.parquet").to_pylist()} == {7}


def test_what_was_judged_is_written_when_it_is_interrupted(job, tmp_path, monkeypatch):
    run(job)
    (tmp_path / "stopping.py").write_text(
        "count = 0\ndef judge(prompt, text):\n    global count\n    count += 1\n"
        "    if count > 4:\n        raise KeyboardInterrupt\n    return count\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(msgspec.structs.replace(job, batch=2, judges=["n=function:stopping:judge"]))
    assert [row.get("scores") for row in rows()] == [{"n": 1.0}, {"n": 2.0}, {"n": 3.0}, {"n": 4.0}, None, None]


def test_a_file_of_something_else_is_left_as_it_is(job, tmp_path):
    for content in (b'{"mine": 1}\n{"mine": 2}', b'{"mine": 1}'):
        (tmp_path / "out.jsonl").write_bytes(content)
        with contextlib.suppress(UsageError):
            run(msgspec.structs.replace(job, model="nowhere/at/all"))
        assert (tmp_path / "out.jsonl").read_bytes() == content


def test_what_is_of_another_model_is_refused_before_one_is_loaded(job, tmp_path, monkeypatch):
    monkeypatch.setattr(rolloutjob, "open_model", None)
    wide, far = np.ones(WIDTH + 1), Site(9, "post_block")
    Probe.make(SITE, wide).save("wide.safetensors")
    Probe.make(far, np.ones(WIDTH)).save("far.safetensors")
    save_vectors("wide-v.safetensors", {1: wide})
    save_vectors("far-v.safetensors", {9: np.ones(WIDTH)})
    width = f"{SITE}: got {WIDTH + 1} numbers, expected {WIDTH}, the width of "
    layer = f"got {far}, expected a site of a layer of .*, 0..3$"
    for changes, message in (
        ({"judges": ["probe:wide.safetensors"]}, f"--judge probe, wide.safetensors: {width}"),
        ({"judges": ["far=probe:far.safetensors"]}, f"--judge far, far.safetensors: {layer}"),
        ({"vectors": {"v": "wide-v.safetensors"}}, f"--vector v, wide-v.safetensors: {width}"),
        ({"vectors": {"v": "far-v.safetensors"}}, f"--vector v, far-v.safetensors: {layer}"),
    ):
        with pytest.raises(UsageError, match=f"^{message}"):
            run(msgspec.structs.replace(job, **changes))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_probe_of_a_site_that_the_back_end_lacks_is_refused(job, tmp_path):
    Probe.make(Site(1, "heads"), np.ones(WIDTH)).save("heads.safetensors")
    with pytest.raises(UsageError, match=r"^heads.safetensors: site: got no tap at heads:1, expected "):
        run(msgspec.structs.replace(job, judges=["probe:heads.safetensors"]))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_models_answers_are_judged_as_transformers_does(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "My day was"}\n{"id": "b", "prompt": "Paris is"}\n')
    site = Site(9, "post_block")
    weight = RNG.normal(size=640) / 640
    Probe.make(site, weight, pool="max").save("p.safetensors")
    run(
        RolloutJob(
            "demo", "transformers", "prompts.jsonl", "out.jsonl", [0.0], max_new_tokens=8,
            judges=["perplexity", "probe:p.safetensors"], arguments={"dtype": "float32"},
        )
    )  # fmt: skip
    path = str(capflow.demo_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for row in rows():
        ids, start = tokenizer(row["prompt"] + row["text"]).input_ids, len(tokenizer(row["prompt"]).input_ids)
        with torch.no_grad():
            output = model(
                torch.tensor([ids]), output_hidden_states=True, labels=torch.tensor([[-100] * start + ids[start:]])
            )
        assert row["scores"]["perplexity"] == pytest.approx(float(output.loss.exp()), rel=1e-3)
        stream = output.hidden_states[site.layer + 1][0, start:].numpy()
        assert row["scores"]["probe"] == pytest.approx(float((stream @ weight).max()), rel=1e-3)
