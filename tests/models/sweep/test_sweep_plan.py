"""Pairs, places and options of sweeps: each wrong one is named in one line before an engine starts."""

import json
import os
import re
import shutil
import types

import msgspec
import numpy as np
import pytest
import transformers

from capflow.errors import UsageError
from capflow_models import sweep_ablate
from capflow_models.backends import fingerprint
from capflow_models.sweep.metrics import digests
from capflow_models.sweep.origin import described
from capflow_models.sweep.pairs import ROLES, PairReader
from capflow_models.sweep.patch import PatchOptions, computed, plan_of
from capflow_models.sweep.plan import PatchPositions, RunKey, SweptPlaces, batches
from capflow_models.sweep.program import SweepJob, run
from capflow_models.sweep.records import check_settings

GOOD = {"clean": "w7 w60 w61 w9", "corrupted": "w7 w70 w61 w9", "answer": " w30", "wrong_answer": " w31"}


@pytest.fixture(scope="module")
def plan(tiny_with_words):
    """Make a plan of one pair, changed as the test says."""

    def make(options=None, **changes):
        return plan_of(tiny_with_words, [GOOD | changes], PatchOptions(**(options or {})))

    return make


def test_a_plan_has_every_site_and_position_in_each_direction(plan):
    made = plan({"hooks": "post_mlp, mlp_out", "layers": "1-2", "positions": "changed,-1", "direction": "both"})
    keys = list(made.keys(0))
    assert keys[:2] == [RunKey("1", "clean"), RunKey("1", "corrupted")]
    assert keys[2:] == [
        RunKey("1", direction, f"{hook}:{layer}", position)
        for direction in ("denoise", "noise")
        for hook in ("post_block", "mlp_out")
        for layer in (1, 2)
        for position in (1, 3)
    ]
    assert made.run_count == len(keys) == 18
    assert made.token_count == 18 * 4
    assert [len(batch) for batch in batches(keys, 7)] == [7, 7, 4]


def test_sites_may_be_named_one_by_one(plan):
    made = plan({"hooks": "blocks.1.hook_mlp_out, post_block:3,mlp_out:1", "positions": "last"})
    assert [run.site for run in list(made.keys(0))[2:]] == ["mlp_out:1", "post_block:3"]
    assert SweptPlaces.parse("router:3").strict, "a site that the model lacks is refused"
    assert not SweptPlaces.parse("router").strict


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corrupted": "w7 w70 w9"}, r"clean and corrupted have 4 and 3 tokens \('w7' .*\), expected equally many"),
        ({"corrupted": GOOD["clean"]}, "clean and corrupted: got the same prompt, expected two prompts"),
        ({"clean": "", "corrupted": ""}, "clean: got no tokens, expected one or more"),
        ({"clean": [1, 300]}, r"clean: got the token 300, expected 0\.\.299"),
        ({"answer": " w30 w31"}, r"answer: got ' w30 w31', 2 tokens after the prompt \('w30' 'w31'\), expected one"),
        ({"answer": ""}, "answer: got '', 0 tokens after the prompt"),
        ({"answer": "w30"}, "answer: got 'w30', which joins the prompt's last word, expected one token of its own"),
        ({"wrong_answer": -1}, r"wrong_answer: got the token -1, expected 0\.\.299"),
        ({"wrong_answer": 30}, "answer and wrong_answer: got the token 'w30' for both, expected two tokens"),
        ({"right": 1}, "Object contains unknown field `right`, expected an object of clean, corrupted, answer"),
        ({"clean": 3}, "expected an object of clean"),
    ],
)
def test_a_wrong_pair_is_named(plan, changes, message):
    with pytest.raises(UsageError, match=f"^pairs, pair 1.*{message}"):
        plan(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": "post_block,attention_magic"}, "hooks: got attention_magic, expected hooks, of pre_attn, "),
        ({"hooks": []}, "hooks: got none"),
        ({"hooks": "post_block:4"}, r"hooks: got post_block:4, expected a layer of 0\.\.3"),
        ({"hooks": "final:2"}, "hooks: got final:2, expected final:3"),
        ({"hooks": "heads:3,mlp_out"}, "hooks: got hooks and sites, expected hooks, or sites"),
        ({"hooks": "heads:x"}, "hooks: got heads:x, expected hooks, of pre_attn, .*; or sites, such as heads:3"),
        ({"hooks": "mlp_out:3", "layers": "1-2"}, "layers: got 1-2, expected all, as hooks names sites"),
        ({"layers": "2-9"}, "layers: got layers 2-9, expected a range within 0"),
        ({"layers": [4]}, r"layers: got layer 4, expected 0\.\.3"),
        ({"layers": "x"}, "layers: got x"),
        ({"positions": "first"}, "positions: got first, expected all, changed, last, together, positions such as"),
        ({"positions": "3-1"}, "positions: got 3-1"),
        ({"positions": "4"}, r"pairs, pair 1: positions: got position 4, expected -4\.\.3, as pair 1 has 4 tokens"),
        ({"positions": -5}, r"positions: got position -5"),
        ({"positions": "2-4"}, r"positions: got position 2-4"),
        ({"positions": ""}, "positions: got ''"),
        ({"positions": []}, "positions: got none, expected all, changed"),
        ({"positions": None}, "positions: got None, expected all, changed"),
        ({"positions": 1.5}, r"positions: got 1\.5, expected all, changed"),
        ({"positions": [1.5]}, r"positions: got 1\.5, expected all, changed"),
        ({"hooks": None}, "hooks: got None, expected hooks, of"),
        ({"direction": []}, "direction: got none, expected one of denoise"),
        ({"direction": None}, "direction: got None, expected one of denoise"),
        ({"metrics": None}, "metrics: got None, expected one of logit_diff"),
        ({"metrics": "kl,loss"}, "metrics: got loss, expected one of logit_diff"),
        ({"batch": 2.5}, r"batch: got 2\.5, expected 1 or more"),
        ({"resamples": None}, "resamples: got None, expected 1 or more"),
        ({"confidence": None}, "confidence: got None, expected between 0 and 1"),
        ({"engine": ["x"]}, r"engine: got \['x'\], expected arguments of capflow.LLM by name"),
        ({"engine": {"consumers": "log"}}, "engine: got consumers, expected an argument that a sweep does not set"),
        ({"engine": {"logits_processors": ["a:b"]}}, "engine: got logits_processors, expected an argument that a"),
        ({"engine": {"max_modl_len": 4}}, "engine: got max_modl_len, expected .*; near: max_model_len"),
        ({"direction": "up"}, "direction: got up, expected one of denoise, noise, both"),
        ({"metrics": ("accuracy",)}, "metrics: got accuracy, expected one of logit_diff, probability, logprob, kl, or"),
        ({"metrics": ()}, "metrics: got none"),
        ({"metrics": ("nowhere:f",)}, "metrics: got nowhere:f: ModuleNotFoundError"),
        ({"metrics": ("json:JSONDecoder.nothing",)}, "metrics: got json:JSONDecoder.nothing: AttributeError"),
        ({"metrics": ("math:pi",)}, "metrics: got math:pi, a float, expected a function"),
        ({"align": "start"}, "align: got start, expected one of position, end, role"),
        ({"batch": 0}, "batch: got 0, expected 1 or more"),
        ({"confidence": 1.0}, r"confidence: got 1\.0, expected between 0 and 1"),
        ({"engine": {"max_model_len": 4}}, "pairs, pair 1: clean: got 4 tokens, expected at most 3"),
    ],
)
def test_a_wrong_option_is_named(plan, options, message):
    with pytest.raises(UsageError, match=message):
        plan(options)


def test_options_may_be_texts_or_missing(plan, tiny_with_words):
    assert plan({"engine": None}).engine == {}
    assert plan({"engine": {"max_model_len": -1}}).run_count == 2 + 4 * 4, "-1 is a length that vLLM finds out"
    assert plan({"metrics": "kl, logit_diff"}).functions == {}
    assert [list(at) for at in plan({"positions": np.int64(-1)}).positions] == [[3]]
    with pytest.raises(UsageError, match="layers: got layer 99"):
        sweep_ablate(tiny_with_words, [GOOD], engine=None, metrics="kl", layers=[99])


def test_pairs_may_come_from_a_pipe(tiny_with_words, tmp_path, capsys):
    read, write = os.pipe()
    os.write(write, json.dumps(GOOD).encode())
    os.close(write)
    options = ("post_block", "all", "all", "denoise", "kl", 1, 1, 0.5)
    job = SweepJob(tiny_with_words, f"/dev/fd/{read}", str(tmp_path / "out"), *options, dry_run=True)
    try:
        run(job)
    finally:
        os.close(read)
    (path := tmp_path / "pairs.jsonl").write_text(json.dumps(GOOD))
    assert "1 pairs of 4 tokens, 4 sites, 4 positions, denoise" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"--engine-arg: got max_modl_len, expected .*; near: max_model_len"):
        run(msgspec.structs.replace(job, pairs=str(path), engine={"max_modl_len": 4}))


def test_a_wrong_file_is_named_with_its_line(tiny_with_words, tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [GOOD, GOOD | {"corrupted": "w7"}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    with pytest.raises(UsageError, match=r"pairs\.jsonl, line 3: clean and corrupted have 4 and 1 tokens"):
        plan_of(tiny_with_words, path, PatchOptions())
    path.write_text("\n".join(json.dumps(GOOD | {"id": "a"}) for _ in range(2)))
    with pytest.raises(UsageError, match=r"line 2: id: got a twice, expected each id once"):
        plan_of(tiny_with_words, path, PatchOptions())
    path.write_text(json.dumps(GOOD) + "\n{nonsense")
    with pytest.raises(UsageError, match=r"pairs\.jsonl, line 2: got JSON is malformed"):
        plan_of(tiny_with_words, path, PatchOptions())
    path.write_text("\n")
    with pytest.raises(UsageError, match="got no lines"):
        plan_of(tiny_with_words, path, PatchOptions())
    with pytest.raises(UsageError, match="No such file"):
        plan_of(tiny_with_words, tmp_path / "nothing", PatchOptions())
    with pytest.raises(UsageError, match="pairs: got none"):
        plan_of(tiny_with_words, [], PatchOptions())


def test_a_wrong_directory_is_named(plan, tiny_with_words, tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UsageError, match=r"out: got .*file, a file, expected a directory"):
        computed(plan(), PatchOptions(), path)
    with pytest.raises(UsageError, match=r"out: got .*file/below: File exists, expected a directory, or a place for"):
        computed(plan(), PatchOptions(), path / "below")
    out = tmp_path / "out"
    out.mkdir()
    (out / "runs.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=re.escape(f"{out}/settings.json: got [Errno 2]")):
        computed(plan(), PatchOptions(), out)
    (out / "settings.json").write_text(json.dumps(plan().settings()))
    with pytest.raises(UsageError, match=r"runs\.jsonl, line 1: got Object missing required field"):
        computed(plan(), PatchOptions(), out)
    with pytest.raises(UsageError, match=r"model: got \./no-such-model: "):
        plan_of("./no-such-model", [GOOD], PatchOptions())


def test_a_dry_run_names_a_directory_of_other_settings(plan, tiny_with_words, tmp_path):
    out, pairs = tmp_path / "out", tmp_path / "pairs.jsonl"
    out.mkdir()
    pairs.write_text(json.dumps(GOOD))
    (out / "runs.jsonl").write_text(
        '{"pair":"1","direction":"clean","site":"","position":-1,"logits":[1,2],"logprobs":[-1,-2],"kl":0,"top":1}\n{"p'
    )
    (out / "settings.json").write_text(json.dumps(plan().settings() | {"model": "another"}))
    options = ("post_block", "all", "all", "denoise", "kl", 1, 1, 0.5)
    job = SweepJob(tiny_with_words, str(pairs), str(out), *options, dry_run=True)
    with pytest.raises(UsageError, match=f"{out}, the model: got another there, expected {tiny_with_words}; choose"):
        run(job)


def test_a_directory_of_another_model_or_version_is_refused(tiny_with_words, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_with_words, model)
    out.mkdir()

    def settings():
        return plan_of(str(model), [GOOD], PatchOptions()).settings()

    before = settings()
    assert set(before["origin"]) == {"model's files", "version of capflow", "version of vllm"}
    (out / "settings.json").write_text(json.dumps(before))
    check_settings(settings(), out)
    (model / "README.md").write_text("nothing that computes")
    check_settings(settings(), out)
    for name in ("config.json", "model.safetensors"):
        path = model / name
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        os.utime(path, ns=(times[0], times[1] + 1))
        with pytest.raises(UsageError, match=r"the model's files: got [0-9a-f]+ there, expected [0-9a-f]+; choose"):
            check_settings(settings(), out)
        os.utime(path, ns=times)
    check_settings(settings(), out)
    for name in ("capflow", "vllm"):
        old = before | {"origin": before["origin"] | {f"version of {name}": "0.0.1"}}
        (out / "settings.json").write_text(json.dumps(old))
        with pytest.raises(UsageError, match=rf"the version of {name}: got 0\.0\.1 there, expected "):
            check_settings(settings(), out)
    assert fingerprint("someone/model-of-the-hub", types.SimpleNamespace(_commit_hash="abc")) == "abc"


def test_a_metric_is_known_by_the_file_of_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "metrics_of_mine.py"
    path.write_text("SCALE = 1\n\ndef f(logits, answer, wrong_answer):\n    return SCALE\n")
    before = digests(["metrics_of_mine:f", "kl"])
    assert digests(["metrics_of_mine:f"]) == before
    path.write_text(path.read_text().replace("SCALE = 1", "SCALE = 2"))
    assert digests(["metrics_of_mine:f"]).keys() == before.keys()
    assert digests(["metrics_of_mine:f"]) != before
    assert digests(["math:hypot"])["math:hypot"], "a built-in function has no file"


class Thing:
    """An object without a repr of its own."""


def test_settings_name_objects_without_an_address():
    for value in (Thing(), [Thing()], {"a": Thing()}, (Thing, plan_of), {Thing}):
        assert "0x" not in described(value)
    assert described(Thing()) == described(Thing()) == f"{__name__}:Thing"
    assert described(plan_of) == "capflow_models.sweep.patch:plan_of"
    assert (
        described({"b": 1, "a": [True, "x"]}) == described({"a": [True, "x"], "b": 1}) == "{'a': [True, 'x'], 'b': 1}"
    )


def test_models_without_a_tokenizer_take_token_ids():
    reader = PairReader(None, 300)
    with pytest.raises(UsageError, match="clean: got a text for a model without a tokenizer; write token ids"):
        plan_with(reader, GOOD)
    with pytest.raises(UsageError, match="answer: got a text for a model without a tokenizer; write a token id"):
        plan_with(reader, GOOD | {"clean": [1, 2], "corrupted": [1, 3]})
    (pair,) = plan_with(reader, {"clean": [1, 2], "corrupted": [1, 3], "answer": 4, "wrong_answer": 5})
    assert pair.clean_text == "1 2"
    assert pair.clean_texts == ("1", "2")


def plan_with(reader, pair):
    from capflow_models.sweep.pairs import read_pairs

    return reader.tokens(*read_pairs([pair]))


def test_an_answer_is_the_token_that_follows_the_prompt(tiny_with_words):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_with_words)
    (pair,) = plan_with(PairReader(tokenizer, 300), GOOD)
    assert (pair.answer, pair.wrong_answer, pair.answer_text) == (30, 31, "w30")
    assert pair.changed == (1,)


@pytest.mark.parametrize(
    ("clean", "corrupted", "roles"),
    [
        ("abcdefg", "abXYZfg", "before before changed_first changed_middle changed_last after_first last"),
        ("abcdefg", "aXcYefg", "before changed_first changed_middle changed_last after_first after last"),
        ("abcd", "abXd", "before before changed_last last"),
        ("abcd", "abcX", "before before before last"),
        ("abcd", "XYZW", "changed_first changed_middle changed_middle last"),
        ("a", "b", "last"),
    ],
)
def test_a_position_has_one_role(clean, corrupted, roles):
    ids = {"clean": list(map(ord, clean)), "corrupted": list(map(ord, corrupted)), "answer": 1, "wrong_answer": 2}
    (pair,) = plan_with(PairReader(None, 300), ids)
    assert pair.roles() == tuple(roles.split())
    assert set(pair.roles()) <= set(ROLES)


def test_places_name_positions(tiny_with_words):
    (pair,) = plan_with(PairReader(None, 300), {"clean": [1, 2, 3, 4, 5], "corrupted": [1, 9, 3, 9, 5], "answer": 1,
                                                "wrong_answer": 2})  # fmt: skip
    for text, expected in {
        "all": [0, 1, 2, 3, 4],
        "changed": [1, 3],
        "last,0": [0, 4],
        "-1, 1-2": [1, 2, 4],
        "-5": [0],
    }.items():
        assert PatchPositions.parse(text).of(pair) == expected
    assert PatchPositions.parse([0, "2-3"]).of(pair) == [0, 2, 3]
