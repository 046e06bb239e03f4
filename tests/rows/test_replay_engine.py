"""A model's run, recorded and replayed: the data set is the same, byte for byte."""

import json
import os
import subprocess
import sys

import pytest

import capflow
from tests.kit.recordings import tree

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = ["w1 w2 w3", "w4 " * 60, "w5 w6 w7 w8", "w9"]


def test_a_replay_of_a_models_run_gives_byte_for_byte_the_same_data_set(tiny_with_words, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))

    def capflow_(*words):
        command = [sys.executable, "-m", "capflow", *map(str, words)]
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr

    job = ["--model", tiny_with_words, "--prompts", prompts, "--max-tokens", 9, "--sampling", "ignore_eos=true"]
    engine = [
        "--engine-arg",
        "max_model_len=256",
        "--engine-arg",
        "enforce_eager=true",
        "--engine-arg",
        'additional_config={"kda_prefill_backend": "triton"}',
        "--address",
        f"ipc://{tmp_path}/h",
    ]
    capflow_("record", tmp_path / "rec", *job, *engine, "--consumer", f"filesystem:root={tmp_path}/live")
    capflow_("replay", tmp_path / "rec", "--consumer", f"filesystem:root={tmp_path}/again", "--consumer", "log")
    live = tree(tmp_path / "live")
    assert set(capflow.open(tmp_path / "live").requests()) == {f"p{n}" for n in range(len(PROMPTS))}
    assert tree(tmp_path / "again") == live
    capflow_("replay", tmp_path / "live", "--consumer", f"filesystem:root={tmp_path}/third")
    third = tree(tmp_path / "third")
    assert {name for name in live if third[name] != live[name]} == {
        name for name in live if name.endswith("request.json")
    }
