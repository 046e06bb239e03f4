"""Rollouts as a user runs them: the file, the rows after a kill, a second run, and work shared by processes."""

import contextlib
import json
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from capflow.capture.site import Site
from capflow.cli.engine.rollouts import _features
from capflow.errors import UsageError
from capflow.steering.request import Steering
from capflow_models import LayerSteeringSpec, SteeringSpec, TransformersSteerableModel, save_vectors
from capflow_models.jobs.rolloutjob import RolloutJob
from capflow_models.jobs.rolloutjob import plan_of as plan_of_job
from capflow_models.model import Sampling
from capflow_models.rollouts.plan import RolloutPlan, RolloutPrompt, missing, roll_out
from capflow_models.runs.lines import LineFile, read_lines
from tests.kit.autoencoders import saelens, weights
from tests.kit.engines import WIDTH, engine, environment, save_tiny, save_words
from tests.kit.waiting import eventually

PROMPTS = {f"p{n}": f"w{n + 5} w{n + 60} w{n + 120}" for n in range(6)}
VECTOR = 4 * np.random.default_rng(0).standard_normal(WIDTH).astype(np.float32)
LIMIT_S = 300


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_words(directory)
    return save_tiny(directory)


@pytest.fixture
def here(tmp_path, tiny):
    """A directory with prompts and two files of vectors, and the options of a run there."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in PROMPTS.items())
    )
    save_vectors(tmp_path / "mood.safetensors", {1: VECTOR, 2: VECTOR})
    save_vectors(tmp_path / "late.safetensors", {3: -VECTOR}, hook="pre_attn")
    return tmp_path, {
        "--model": tiny,
        "--backend": "transformers",
        "--prompts": "prompts.jsonl",
        "--out": "out.jsonl",
        "--scales": "0,1,-1",
        "--max-new-tokens": "6",
    }


def command(options):
    vectors = ["--vector", "mood=mood.safetensors", "--vector", "late=late.safetensors"]
    words = [str(each) for pair in options.items() for each in pair]
    return [sys.executable, "-m", "capflow", "rollouts", *vectors, *words]


def run(directory, options, code=0):
    done = subprocess.run(command(options), cwd=directory, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def rows(path):
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.splitlines()]


def keys(answers):
    return [(row["prompt_id"], row["vector"], row["scale"], row["sample"]) for row in answers]


WANTED = [
    (prompt, vector, scale, 0)
    for prompt in PROMPTS
    for vector, scale in [("none", 0.0), ("mood", 1.0), ("mood", -1.0), ("late", 1.0), ("late", -1.0)]
]


@pytest.fixture(scope="module")
def model(tiny):
    return TransformersSteerableModel(tiny)


def test_each_item_has_its_row_steered_as_it_says(here, model, tiny):
    directory, options = here
    output = run(directory, options)
    assert f"{len(WANTED)} rollouts in out.jsonl" in output
    answers = rows(directory / "out.jsonl")
    assert keys(answers) == WANTED
    sites = {"none": [], "mood": [1, 2], "late": [Site(3, "pre_attn")]}
    sign = {"none": 1, "mood": 1, "late": -1}
    for row in answers:
        name = row["vector"]
        spec = SteeringSpec({site: LayerSteeringSpec(sign[name] * VECTOR, row["scale"]) for site in sites[name]})
        with model.steering(spec):
            (done,) = model.complete([row["prompt"]], Sampling(6))
        assert (row["text"], row["tokens"], row["prompt_tokens"]) == (done.text, len(done.token_ids), 3)
        assert (row["model"], row["backend"], row["seed"]) == (tiny, "transformers", 0)
    assert len({row["text"] for row in answers if row["prompt_id"] == "p0"}) > 2


@pytest.mark.long
def test_a_killed_run_leaves_whole_lines_and_the_next_goes_on(here):
    directory, options = here
    options |= {"--max-new-tokens": "30", "--samples": "2", "--temperature": "1.0", "--seed": "3"}
    out = directory / "out.jsonl"
    running = subprocess.Popen(command(options), cwd=directory, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 3, LIMIT_S)
    finally:
        running.send_signal(signal.SIGKILL)
        assert running.wait(LIMIT_S) == -signal.SIGKILL, "the run was not over when it was killed"
    kept = rows(out)
    assert 3 <= len(kept) < 2 * len(WANTED)
    with out.open("ab") as file:
        file.write(b'{"prompt_id": "p0", "vec')  # as a full disk leaves it
    output = run(directory, options)
    assert f"{len(kept)} of {2 * len(WANTED)} rollouts already exist" in output
    answers = rows(out)
    assert answers[: len(kept)] == kept
    assert keys(answers) == [(*key[:3], sample) for key in WANTED for sample in range(2)]
    run(directory, options | {"--out": "whole.jsonl"})
    assert rows(directory / "whole.jsonl") == answers
    before = out.read_bytes()
    run(directory, options)
    assert out.read_bytes() == before


@pytest.mark.long
def test_workers_share_the_work(here):
    directory, options = here
    for offset in range(2):
        run(directory, options | {"--stride": "2", "--offset": offset})
    parts = [rows(directory / f"out.{offset}-of-2.jsonl") for offset in range(2)]
    assert [keys(part) for part in parts] == [WANTED[0::2], WANTED[1::2]]


@pytest.mark.long
def test_parquet_has_the_same_rows_and_grows(here):
    directory, options = here
    run(directory, options)
    parquet = options | {"--out": "out.parquet"}
    (directory / "prompts.jsonl").write_text("".join((directory / "prompts.jsonl").read_text().splitlines(True)[:4]))
    run(directory, parquet)
    expected = rows(directory / "out.jsonl")
    assert pq.read_table(directory / "out.parquet").to_pylist() == expected[: 4 * 5]
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": name, "prompt": text}) + "\n" for name, text in PROMPTS.items())
    )
    assert "20 of 30 rollouts already exist" in run(directory, parquet)
    assert pq.read_table(directory / "out.parquet").to_pylist() == expected
    assert not list(directory.glob("out.parquet.*"))


def test_ctrl_c_is_one_line_and_130(here):
    directory, options = here
    out = directory / "out.jsonl"
    running = subprocess.Popen(
        command(options | {"--max-new-tokens": "200", "--samples": "40", "--temperature": "1.0"}),
        cwd=directory,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: out.exists() and out.stat().st_size > 0, LIMIT_S)
        running.send_signal(signal.SIGINT)
        output = running.communicate(timeout=LIMIT_S)[1]
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert output.splitlines()[-1] == "capflow: interrupted"
    rows(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--out": "out.csv"}, "--out: got out.csv, expected a .jsonl or a .parquet file"),
        ({"--stride": "2", "--offset": "2"}, "--offset: got 2, expected 0..1"),
        ({"--scales": "1,x"}, "--scales: got 1,x"),
        ({"--scales": "1,1.0"}, "--scales: got 1.0 twice"),
        ({"--scales": "1,nan"}, "--scales: got nan, expected a finite number"),
        ({"--prompts": "none.jsonl"}, "--prompts none.jsonl: got No such file"),
        ({"--vector": "none=mood.safetensors"}, "--vector: got none"),
        ({"--vector": "mood=late.safetensors"}, "--vector: got mood=late.safetensors"),
        ({"--vector": "x=nowhere.npz"}, "nowhere.npz: got no such file"),
        ({"--out": "prompts.jsonl"}, "prompts.jsonl, line 1: got"),
    ],
)
def test_what_is_wrong_is_named_before_a_model_is_loaded(here, change, message):
    directory, options = here
    output = run(directory, options | {"--model": "nowhere/at/all"} | change, code=2)
    assert len(output.splitlines()) == 1
    assert message in output


# the parts


def plan_of(**changes):
    given = {
        "model": "m",
        "backend": "transformers",
        "prompts": [RolloutPrompt("a", "w5 w6"), RolloutPrompt("b", "w7", 3)],
        "vectors": {"v": {Site(1, "post_block"): VECTOR}},
        "scales": [0.0, 1.0],
        "samples": 1,
        "seed": 0,
        "sampling": Sampling(4),
    }
    return RolloutPlan(**(given | changes))


def rows_of(plan):
    return [plan.row(item, "text", 2, 4) for item in plan.items()]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"backend": "vllm"},
        {"seed": 1},
        {"sampling": Sampling(5)},
        {"sampling": Sampling(4, 0.5)},
        {"arguments": {"dtype": "float32"}},
        {"vectors": {"v": {Site(1, "post_block"): 2 * VECTOR}}},
        {"vectors": {"v": {Site(2, "post_block"): VECTOR}}},
        {"prompts": [RolloutPrompt("a", "w5 w7")]},
    ],
)
def test_rows_that_were_made_otherwise_are_refused(changes):
    plan = plan_of()
    assert missing(plan, plan.items(), rows_of(plan), "out.jsonl") == []
    with pytest.raises(UsageError, match=r"out\.jsonl: prompt a, vector .* a row with other settings"):
        missing(plan_of(**changes), plan_of(**changes).items(), rows_of(plan), "out.jsonl")


def test_more_scales_and_samples_go_on_from_what_is_there():
    plan = plan_of()
    more = plan_of(scales=[0.0, 1.0, 2.0], samples=2)
    todo = missing(more, more.items(), rows_of(plan), "out.jsonl")
    assert len(todo) == 2 * 3 * 2 - len(rows_of(plan))


def test_a_prompt_may_have_a_length_of_its_own(model, tmp_path):
    plan = plan_of(sampling=Sampling(4, ignore_eos=True))
    with LineFile(tmp_path / "out.jsonl") as file:
        assert list(roll_out(model, plan, plan.items(), file, batch=3)) == [3, 1]
        assert [json.loads(line)["tokens"] for line in file.lines()] == [4, 4, 3, 3]


def test_one_process_writes_a_file(tmp_path):
    with (
        LineFile(tmp_path / "out.jsonl"),
        pytest.raises(UsageError, match="another process writes it"),
        LineFile(tmp_path / "out.jsonl"),
    ):
        pass


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b"{}", b""),
        (b"{}\n", b"{}\n"),
        (b"{}\n{", b"{}\n"),
        (b"{}\n" + b"x" * 200_000, b"{}\n"),
        (b"x" * 200_000, b""),
        (b"x" * 200_000 + b"\n{", b"x" * 200_000 + b"\n"),
    ],
)
def test_a_line_without_an_end_is_cut_off(tmp_path, content, kept):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with LineFile(path) as file:
        # A file of something else is left as it is.
        assert path.read_bytes() == content
        assert file.lines() == kept.splitlines()
        file.add([b"1", b"2"])
    assert path.read_bytes() == kept + b"1\n2\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a"}', "line 2: got"),
        ("nonsense", "line 2: got"),
        ('{"id": "a", "prompt": "b", "c": 1}', "line 2: got"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"id": "z", "prompt": "y"}}\n{line}\n')
    with pytest.raises(UsageError, match=message):
        read_lines(path, "--prompts", RolloutPrompt)


@pytest.mark.engine
def test_both_back_ends_answer_alike(tiny, model, tmp_path):
    from capflow_models import VLLMSteerableModel

    plan = plan_of(scales=[0.0, 0.5, -1.0], sampling=Sampling(8, ignore_eos=True))
    exact = TransformersSteerableModel(tiny, dtype="float32")
    answers = {}
    with engine(tiny, skip_tokenizer_init=False) as llm, contextlib.ExitStack() as stack:
        for name, each in (("ours", VLLMSteerableModel(llm)), ("theirs", exact)):
            file = stack.enter_context(LineFile(tmp_path / f"{name}.jsonl"))
            assert sum(roll_out(each, plan, plan.items(), file, batch=4)) == len(plan.items())
            answers[name] = rows(file.path)
    assert answers["ours"] == answers["theirs"]
    assert len({row["text"] for row in answers["ours"] if row["prompt_id"] == "a"}) == 3


@pytest.mark.engine
@pytest.mark.long
def test_the_command_runs_vllm(here):
    directory, options = here
    options |= {"--backend": "vllm", "--model-arg": "dtype=float32", "--batch": "7"}
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with environment(**variables):
        run(directory, options)
        assert f"{len(WANTED)} of {len(WANTED)} rollouts already exist" in run(directory, options)
    run(directory, options | {"--backend": "transformers", "--out": "theirs.jsonl"})
    ours, theirs = (rows(directory / name) for name in ("out.jsonl", "theirs.jsonl"))
    assert keys(ours) == keys(theirs) == WANTED
    assert [row["text"] for row in ours] == [row["text"] for row in theirs]


def test_normalized_steering_is_by_the_streams_norm_and_another_row():
    plain, normal = plan_of(), plan_of(relative=True)
    item = next(item for item in plain.items() if item.scale)
    vectors = normal.job(item).steering.base.vectors
    assert [vector.relative for vector in vectors] == [True] * len(vectors) != []
    assert [vector.scale for vector in vectors] == [item.scale] * len(vectors)
    assert not any(vector.relative for vector in plain.job(item).steering.base.vectors)
    assert plain.settings(item) != normal.settings(item)


def features_job(path, **changes):
    given = {"model": "m", "backend": "transformers", "prompts": str(path / "prompts.jsonl"), "out": "out.jsonl"}
    features = {"glad": {"sae": "mood", "features": {"3": 4.0, "7": {"set": 0, "strength": 0.5}}}}
    saes = [f"mood={path / 'sae'}"]
    return RolloutJob(**(given | {"scales": [0.0, 1.0, -2.0], "features": features, "saes": saes} | changes))


@pytest.fixture
def with_sae(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "w5 w6"}\n')
    saelens(tmp_path / "sae", weights(jumps=True, width=WIDTH), "jumprelu")
    return tmp_path


def test_features_stand_beside_vectors_and_scales_multiply_them(with_sae, tiny):
    plan = plan_of_job(features_job(with_sae))
    items = {item.scale: item for item in plan.items()}
    assert [(item.vector, item.scale) for item in items.values()] == [("none", 0.0), ("glad", 1.0), ("glad", -2.0)]
    uses = plan.job(items[-2.0]).steering.features
    assert [(use.number, use.sets, use.value, use.strength) for use in uses] == [
        (3, False, -8.0, 1.0),
        (7, True, 0, -1),
    ]
    assert plan.hooks == ["post_block"]
    other = saelens(with_sae / "other", weights(jumps=True, width=WIDTH, seed=1), "jumprelu")
    digests = {
        plan_of_job(job).settings(items[1.0])
        for job in (
            features_job(with_sae),
            features_job(with_sae, saes=[f"mood={other}"]),
            features_job(with_sae, features={"glad": {"sae": "mood", "features": {"3": 5.0}}}),
        )
    }
    assert len(digests) == 3
    model = TransformersSteerableModel(tiny, dtype="float32", saes=features_job(with_sae).saes)
    done = model.run([plan.job(item) for item in items.values()])
    asked = {"sae": "mood", "features": {3: -8.0, 7: {"set": 0, "strength": -1.0}}}
    steering = Steering.parse({"steering_features": asked})
    assert done[2] == model.complete("w5 w6", Sampling(64, seed=0), steering=steering)[0]
    assert len({answer.token_ids for answer in done}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"saes": []}, "--features glad.features.3: got autoencoder mood, expected a known one (none is named)"),
        ({"features": {"x": {"sae": "mood", "features": {"99": 1.0}}}}, "--features x.features.99: got 99, expected a"),
        ({"features": {"x": {"sae": "mood", "features": {"1": "a"}}}}, "--features x.features.1: got "),
        (
            {"features": {"x": {"sae": "mood", "features": {"1": 1.0}, "gate": "g"}}},
            "--features x.features.1.gate: got",
        ),
        (
            {"features": {"none": {"sae": "mood", "features": {"1": 1.0}}}},
            "--features: got none, expected another name",
        ),
        ({"vectors": {"glad": "x.npz"}}, "--vector, --features: names: got glad twice"),
        ({"relative": True}, "--normalize-steering: got given with --features, expected vectors only"),
    ],
)
def test_features_that_cannot_be_are_refused_with_the_option(with_sae, changes, message):
    with pytest.raises(UsageError) as caught:
        plan_of_job(features_job(with_sae, **changes))
    assert str(caught.value).startswith(message)


def test_a_feature_of_a_topk_autoencoder_is_not_set(with_sae):
    saelens(with_sae / "topk", weights(width=WIDTH), "topk", k=4)
    with pytest.raises(UsageError, match=r"--features glad.features.7: got set with mood, a TopK autoencoder"):
        plan_of_job(features_job(with_sae, saes=[f"mood={with_sae / 'topk'}"]))


def test_the_option_features_is_json_by_name():
    assert _features(('a={"sae": "m", "features": {"1": 2}}',)) == {"a": {"sae": "m", "features": {"1": 2}}}
    for given, message in (
        (("a",), "--features: got a, expected NAME=JSON, each name once"),
        (("a={}", "a={}"), "--features: got a={}, expected NAME=JSON, each name once"),
        (("a={1}",), "--features a: got {1}: "),
        (('a={"sae": 1, "sae": 2}',), "--features a: "),
    ):
        with pytest.raises(UsageError) as caught:
            _features(given)
        assert str(caught.value).startswith(message)


def test_the_option_normalizes_what_is_rolled_out(monkeypatch):
    from click.testing import CliRunner

    import capflow.cli.engine.become
    from capflow.cli.engine.rollouts import rollouts

    jobs = []
    monkeypatch.setattr(capflow.cli.engine.become, "become", lambda _, job: jobs.append(job))
    words = ["--model", "m", "--prompts", "p", "--out", "o.jsonl"]
    for more in ([], ["--normalize-steering"]):
        assert CliRunner().invoke(rollouts, [*words, *more]).exit_code == 0
    assert [msgspec.convert(job, RolloutJob).relative for job in jobs] == [False, True]
