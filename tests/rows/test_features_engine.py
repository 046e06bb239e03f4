"""Steering by features of autoencoders in real engines: one batch, the prefix cache, modules, and refusals."""

import os
import subprocess
import sys

import pytest

import capflow
from capflow.errors import UsageError
from capflow.steering.request import Steering
from tests.kit.autoencoders import saelens, weights
from tests.kit.engines import GREEDY, VOCABULARY, engine, prompts, save_tiny
from tests.kit.featured import FeatureReference, given, prove, right, saved
from tests.kit.sources import KIT
from tests.kit.steered import RAW

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(model):
    return FeatureReference(model)


@pytest.fixture(scope="module")
def saes(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("saes"))


@pytest.fixture(scope="module")
def llm(model, saes):
    small = {"block_size": 32, "num_gpu_blocks_override": 100}
    with engine(model, sites=["*:*"], saes=saes, **small, **RAW) as llm:
        yield llm


def asks(**more):
    return capflow.sampling_params(**{"max_tokens": 3, "logprobs": VOCABULARY, **GREEDY, **more})


def test_features_are_added_and_set_in_one_batch(llm, expected):
    prove(llm, expected)


@pytest.mark.long
def test_features_are_added_and_set_in_a_compiled_engine(model, saes, expected):
    with engine(model, sites=["*:*"], saes=saes, enforce_eager=False, **RAW) as llm:
        prove(llm, expected)


@pytest.mark.long
def test_features_are_added_and_set_on_the_v2_runner(model):
    paths = [str(KIT / "triton_cpu"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "tests.kit.featured", model]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-2:] == ["proved", "14"]


def test_the_prefix_cache_keeps_apart_what_is_set(llm, expected):
    (prompt,) = prompts((100,), seed=41)
    turns = [
        ({}, False),
        ({"steering_features": given("jump", f3={"set": 5.0})}, False),
        ({"steering_features": given("jump", f3={"set": 4.0})}, False),
        ({"steering_features": given("jump", f4={"set": 5.0})}, False),
        ({"steering_features": given("jump", f3={"set": 5.0, "strength": 0.5})}, False),
        ({"steering_features": given("jump", f3=5.0)}, False),
        ({"decode_steering_features": given("jump", f3={"set": 5.0})}, True),
        ({"steering_features": given("jump", f3={"set": 5.0})}, True),
        ({"steering_features": given("jump", f3={"set": 5, "strength": 1.0})}, True),
        ({}, True),
    ]
    for number, (fields, cached) in enumerate(turns):
        (output,) = llm.generate([prompt], [asks(**fields)], use_tqdm=False)
        right(expected, output, fields, f"turn {number}")
        assert (output.num_cached_tokens > 0) == cached, f"turn {number}"


def test_modules_and_the_global_state_have_features(llm, expected):
    (prompt,) = prompts((20,), seed=42)
    glad = given("jump", f3={"set": 5.0}, f4=2.0)
    llm.steering.register("glad", Steering.parse({"steering_features": glad}))
    (output,) = llm.generate([prompt], [asks(steering_name={"glad": 0.5})], use_tqdm=False)
    half = given("jump", f3={"set": 5.0, "strength": 0.5}, f4=1.0)
    right(expected, output, {"steering_features": half})
    assert output.steering_applied.prefill == {"post_block:1": 3}
    llm.steering.set_global(Steering.parse({"steering_features": given("relu", f2={"set": 3.0})}))
    try:
        (output,) = llm.generate([prompt], [asks()], use_tqdm=False)
    finally:
        llm.steering.clear_global()
    right(expected, output, {"steering_features": given("relu", f2={"set": 3.0})})


def test_what_is_refused_before_anything_runs(llm):
    (prompt,) = prompts((8,), seed=43)

    def refused(message, **fields):
        params = capflow.sampling_params(**fields)
        with pytest.raises(UsageError) as caught:
            llm.generate([prompt], [params], use_tqdm=False)
        assert message in str(caught.value)

    field = "steering_features.features"
    refused(
        f"{field}.3: got autoencoder mood, expected a known one (jump, relu, topk, trans); name it at the engine's",
        steering_features=given("mood", f3=1.0),
    )
    refused(f"{field}.48: got 48, expected a feature of ", steering_features=given("jump", f48=1.0))
    refused("0..47", decode_steering_features=given("jump", f48=1.0))
    refused(f"{field}.3: got set with topk, a TopK autoencoder", steering_features=given("topk", f3={"set": 0}))
    refused(f"{field}.3: got set with trans, a transcoder from mlp_in:1 to mlp_out:1, expected add, or an auto",
            steering_features=given("trans", f3={"set": 0}))  # fmt: skip
    many = {f"f{n}": {"set": 0} for n in range(17)}
    refused("steering_features.post_block.1: got 17 features that are set, expected at most 16 at one position",
            steering_features=given("jump", **many))  # fmt: skip
    llm.steering.register("glad", Steering.parse({"steering_features": given("jump", f3={"set": 5.0})}))
    refused("got a feature set twice, expected each feature once; set it in one place",
            steering_name="glad", steering_features=given("jump", f3={"set": 1.0}))  # fmt: skip
    with pytest.raises(UsageError, match="got autoencoder mood"):
        llm.steering.register("bad", Steering.parse({"steering_features": given("mood", f3=1.0)}))


@pytest.mark.parametrize(
    ("width", "hook", "options", "message"),
    [
        (32, "blocks.1.hook_resid_post", {}, "sae: decoder: got 32 numbers a row, expected 64, the model's width"),
        (64, "blocks.9.hook_resid_post", {}, "sae: site: got post_block:9, expected a layer of the model, 0..3"),
        (
            64,
            "blocks.1.hook_mlp_out",
            {"sites": ["post_block:*"]},
            "sae: site: got no tap at mlp_out:1, expected a tap",
        ),
        (
            64,
            "blocks.1.hook_resid_post",
            {"steer_sites": ["post_block:2"]},
            "sae: site: got post_block:1, which can on",
        ),
    ],
)
def test_what_stops_the_start(model, tmp_path, width, hook, options, message):
    sae = saelens(tmp_path / "sae", weights(width=width), hook=hook)
    with pytest.raises(UsageError) as caught:
        capflow.LLM(model, saes=[str(sae)], skip_tokenizer_init=True, **options)
    assert message in str(caught.value)
