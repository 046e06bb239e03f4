"""Steering of a model job: files for every prompt, fields in single lines; the rows are those of `capflow.LLM`."""

import json

import msgspec
import numpy as np
import pytest

import capflow
from capflow.cli.engine.prompts import read_prompts
from capflow.errors import UsageError
from capflow.steering.request import Steering
from capflow_engine.jobs.job import JobRequest
from capflow_engine.steering.module import load_module
from tests.kit import engines
from tests.kit.autoencoders import saelens, weights
from tests.kit.waiting import eventually

pytestmark = pytest.mark.engine

TOKENS = 5
CAPTURE = {"hooks": {"post_block": "all"}}


def vector(seed):
    return engines.vector(seed).tolist()


ALL = {"decode_vectors": {"post_block": {"0": vector(1)}}}
CALM = {"vectors": {"post_block": {"2": vector(2)}}, "clamps": {"post_block": {"1": {"vector": vector(3), "value": 0}}}}
STEERED = {
    "nothing": {},
    "vectors": {"steering_vectors": {"post_mlp": {"1": {"vector": vector(4), "scale": 2.0}}}},
    "relative": {"prefill_steering_vectors": {"post_block": {"2": {"vector": vector(5), "relative": True}}}},
    "clamps": {"decode_steering_clamps": {"post_block": {"1": {"vector": vector(6), "min": -0.5, "max": 0.5}}}},
    "patches": {"steering_patches": {"post_block": {"1": {"positions": [2, -1], "vector": vector(7)}}}},
    "named": {"steering_name": ["calm"], "steering_scale": 0.5},
    "pair": {"steering_module_ref": ["calm", 0.5]},
    "null": {"steering_vectors": None},
}  # fmt: skip


@pytest.fixture
def job(tiny_with_words, tmp_path):
    """Return a function that makes a job from lines and options, through the file and the message to the child."""

    def make(lines, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": "w5 w6 w7 w8", "capture": CAPTURE} | line) + "\n" for line in lines)
        )
        asked = {
            "engine_id": "job", "model": tiny_with_words,
            "prompts_file": "prompts.jsonl", "prompts": read_prompts(path),
            "hub": "ipc:///nowhere", "sites": ["post_block:*"], "max_tokens": TOKENS, "sampling": {"ignore_eos": True},
            "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_batched_tokens": 64},
        } | options  # fmt: skip
        return msgspec.json.decode(msgspec.json.encode(asked), type=JobRequest)

    return make


def run(job):
    """Run a job in this process; return its events, or the message of its UsageError."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    events = []
    with engines.environment(**variables), engines.collecting_little():
        from vllm.distributed import cleanup_dist_env_and_memory

        from capflow_engine.jobs import batch

        try:
            batch.run(job, lambda event, **fields: events.append((event, fields)))
        except UsageError as e:
            assert "ready" not in [event for event, _ in events]
            return str(e)
        finally:
            cleanup_dist_env_and_memory()
    return events


def test_prompts_are_steered_as_requests_of_an_engine_are(job, keeper, tiny_with_words, tmp_path):
    (tmp_path / "all.json").write_text(json.dumps(ALL))
    (tmp_path / "calm.json").write_text(json.dumps(CALM))
    lines = [{"id": name, **fields} for name, fields in STEERED.items()]
    modules = [f"calm={tmp_path}/calm.json"]
    events = run(job(lines, hub=keeper.address, steering=f"{tmp_path}/all.json", steering_modules=modules))
    done = {fields["id"]: fields for event, fields in events if event == "done"}
    with engines.engine(tiny_with_words, hub=keeper.address, skip_tokenizer_init=False) as llm:
        llm.steering.set_global(load_module(tmp_path / "all.json"))
        llm.steering.register("calm", load_module(tmp_path / "calm.json"))
        params = [
            capflow.sampling_params(
                id=f"as {name}", capture=CAPTURE, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **fields
            )
            for name, fields in STEERED.items()
        ]
        outputs = dict(zip(STEERED, llm.generate(["w5 w6 w7 w8"] * len(params), params), strict=True))
    eventually(lambda: len(keeper.done) == 2 * len(STEERED))
    assert set(done) == set(outputs)
    for name, output in outputs.items():
        assert done[name]["steering_applied"] == msgspec.to_builtins(output.steering_applied)
        assert done[name]["steering_applied"]["global"]
        assert done[name]["text"] == output.outputs[0].text
        for site, expected in keeper.rows[f"as {name}"].items():
            assert sorted(expected) == sorted(keeper.rows[name][site]) == list(range(4 + TOKENS - 1))
            for position, (token, row) in expected.items():
                assert keeper.rows[name][site][position][0] == token
                np.testing.assert_allclose(keeper.rows[name][site][position][1], row, rtol=1e-5, atol=1e-5)
    keys = {name: fields["steering_applied"]["key"] for name, fields in done.items()}
    assert keys["named"] == keys["pair"]
    assert keys["nothing"] == keys["null"]
    assert len(set(keys.values())) == len(STEERED) - 2


def test_nothing_steers_a_job_without_steering(job, keeper):
    events = run(job([{"id": "one"}], hub=keeper.address))
    assert [fields["steering_applied"] for event, fields in events if event == "done"] == [None]


def test_prompts_are_steered_by_features(job, keeper, tmp_path):
    tensors = weights(width=64)
    sae = saelens(tmp_path / "mood", tensors)
    vector = {"post_block": {"1": {"vector": tensors["W_dec"][3].tolist(), "scale": 2.0}}}
    lines = [
        {"id": "features", "steering_features": {"sae": "mood", "features": {"3": 2.0}}},
        {"id": "vector", "steering_vectors": vector},
        {"id": "set", "steering_features": {"sae": "mood", "features": {"3": {"set": 2.0}}}},
        {"id": "named", "steering_name": "glad"},
    ]
    (tmp_path / "glad.json").write_text(json.dumps({"features": {"sae": "mood", "features": {"3": {"set": 2.0}}}}))
    events = run(job(lines, hub=keeper.address, saes=[str(sae)], steering_modules=[f"glad={tmp_path}/glad.json"]))
    done = {fields["id"]: fields for event, fields in events if event == "done"}
    keys = {name: fields["steering_applied"]["key"] for name, fields in done.items()}
    assert keys["features"] == keys["vector"] != keys["set"] == keys["named"]
    assert done["features"]["text"] == done["vector"]["text"]
    assert done["set"]["steering_applied"]["prefill"] == {"post_block:1": 2}


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ({"steering_name": "glad"}, {},
         "prompts.jsonl, line 2, steering_name: got glad, expected a module of --steering-modules (calm)"),
        ({"steering_features": {"sae": "mood", "features": {"1": 2.0}}}, {},
         "prompts.jsonl, line 2, steering_features.features.1: got autoencoder mood, expected a known one (none is"),
        ({}, {"saes": ["{tmp}/none"]}, "{tmp}/none: got no such directory"),
        ({"steering_vectors": {"post_block": {"9": [1.0] * 64}}}, {},
         "prompts.jsonl, line 2, steering_vectors.post_block.9: got layer 9, expected 0..3"),
        ({"steering_vectors": {"mlp_in": {"1": [1.0] * 64}}}, {},
         "prompts.jsonl, line 2, steering_vectors.mlp_in.1: got no tap at mlp_in:1"),
        ({"steering_clamps": {"post_block": {"1": {"vector": [1.0] * 8, "value": 0}}}}, {},
         "prompts.jsonl, line 2, steering_clamps.post_block.1: got 8 numbers, expected 64"),
        ({"steering_patches": {"post_block": {"1": {"positions": [0, 1, 2], "vector": [vector(n) for n in range(3)]}}}},
         {"steering_bank_bytes": 512}, "prompts.jsonl, line 2, steering_patches: "),
        ({"steering_patches": {"post_block": {"1": {"positions": [0, 1, 2], "vector": [vector(n) for n in range(3)]}}}},
         {"steering_bank_bytes": 768, "sites": ["post_block:*", "neurons:*"]},
         "prompts.jsonl, line 2, steering_patches: got 3 different vectors, expected at most 2, the size"),
        ({}, {"steering": "{tmp}/none.json"}, "{tmp}/none.json: got no such file"),
        ({}, {"steering": "{tmp}/wide.json"}, "{tmp}/wide.json: vectors.post_block.1: got 8 numbers, expected 64"),
        ({}, {"steering_modules": ["wide={tmp}/wide.json"]},
         "{tmp}/wide.json: vectors.post_block.1: got 8 numbers, expected 64"),
        ({}, {"steering_modules": ["wide"]}, "--steering-modules: got wide, expected NAME=PATH"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_the_model_is_loaded(job, tmp_path, line, options, words):
    (tmp_path / "wide.json").write_text(json.dumps({"vectors": {"post_block": {"1": [1.0] * 8}}}))
    (tmp_path / "calm.json").write_text(json.dumps(CALM))

    def here(value):
        return [here(each) for each in value] if isinstance(value, list) else str(value).format(tmp=tmp_path)

    options = {name: value if isinstance(value, int) else here(value) for name, value in options.items()}
    message = run(
        job([{"id": "a"}, {"id": "b", **line}], **{"steering_modules": [f"calm={tmp_path}/calm.json"]} | options)
    )
    assert message.startswith(here(words))


def test_an_argument_that_vllm_does_not_know_is_named_before_the_model_is_loaded(job):
    message = run(job([{"id": "a"}], engine={"colour": "red"}))
    assert message.startswith("--engine-arg or --sampling: got ")
    assert "colour" in message


def test_the_lines_fields_are_parsed_as_everywhere(job):
    for fields in STEERED.values():
        steering_fields = {name: value for name, value in fields.items() if value is not None}
        assert job([{"id": "a", **fields}]).prompts[0].steering == (
            Steering.parse(steering_fields) if steering_fields else None
        )
