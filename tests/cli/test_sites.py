"""`capflow sites`: a model's sites and the tapped ones, from its configuration alone, and each way to fail."""

import json
import os
import subprocess
import sys

import pytest
import transformers

from capflow.capture.site import FORWARD_HOOKS
from capflow.errors import UsageError

pytestmark = pytest.mark.engine

LIMIT_S = 120
HOOKS = ["pre_attn", "attn_in", "attn_out", "post_attn", "mlp_in", "mlp_out", "post_block"]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 300,
}


def sites(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "capflow", "sites", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def only_a_configuration(directory, config, architecture):
    """Save a model's configuration, and none of its weights."""
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = transformers.LlamaConfig(**SMALL)
    return only_a_configuration(tmp_path_factory.mktemp("llama"), config, "LlamaForCausalLM")


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    config = transformers.GPTNeoXConfig(**SMALL)
    return only_a_configuration(tmp_path_factory.mktemp("neox"), config, "GPTNeoXForCausalLM")


def refused(done, *parts):
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for part in parts:
        assert part in lines[0]


def test_shows_what_a_model_has_and_what_is_tapped(llama):
    done = sites(llama, "--sites", "post_block:*", "--sites", "mlp_in:1")
    assert done.returncode == 0, done.stderr
    first, head, *lines = done.stdout.splitlines()
    *lines, reason, other, more, taps = lines
    lines, shapes = lines[: len(FORWARD_HOOKS)], lines[len(FORWARD_HOOKS) :]
    assert shapes == [
        *(f"A row of {hook} has 2x32 numbers." for hook in ("heads", "q", "k", "v")),
        "A row of neurons has 96 numbers.",
    ]
    assert reason == "LlamaDecoderLayer has no router: the layer's MLP is no mixture of experts"
    assert first == "LlamaDecoderLayer: layers 0-2"
    assert head.split() == ["hook", "layers", "tapped", "TransformerLens", "nnsight"]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(rows) == list(FORWARD_HOOKS)
    assert rows["post_block"] == ["0-2", "0-2", "hook_resid_post", "output"]
    assert rows["mlp_in"] == ["0-2", "1", "ln2.hook_normalized", "mlp.input"]
    assert rows["attn_out"] == ["0-2", "-", "hook_attn_out", "-"]
    assert rows["final"] == ["2", "-", "(ln_final.hook_normalized)", "-"]
    assert rows["heads"] == ["0-2", "-", "attn.hook_z", "self_attn.o_proj.input"]
    assert rows["neurons"] == ["0-2", "-", "mlp.hook_post", "mlp.down_proj.input"]
    assert rows["router"] == ["-", "-", "mlp.gate.hook_out", "-"]
    assert "blocks.LAYER.NAME" in other
    assert "model.layers.LAYER.NAME" in more
    assert taps.startswith("4 taps.")


def test_says_why_a_hook_is_not_there(parallel):
    done = sites(parallel, "--json", "--sites", "*:*")
    assert done.returncode == 0, done.stderr
    layers = json.loads(done.stdout)
    assert len(layers) == 3
    for number, layer in enumerate(layers):
        there = {*HOOKS, "q", "k", "v", "heads", "neurons", *(["final"] if number == 2 else [])} - {"post_attn"}
        assert set(layer["available"]) == set(layer["tapped"]) == there
        assert layer["shapes"] == {"q": [2, 32], "k": [2, 32], "v": [2, 32], "heads": [2, 32], "neurons": [96]}
        assert set(layer["missing"]) == {"post_attn", "router"}
        assert layer["missing"]["post_attn"] == "attention and the MLP stand side by side"


NOT_THERE = [("post_attn:1", "stand side by side"), ("post_block:3", "a layer of 0..2"), ("final:0", "the last layer")]


@pytest.mark.parametrize(("site", "why"), NOT_THERE)
def test_a_site_that_is_not_there_is_no_tap(parallel, site, why):
    """In this process, as `capflow sites` reads the model in one of its own."""
    from vllm.engine.arg_utils import EngineArgs

    from capflow_engine.compat import model as compat_model
    from capflow_engine.settings import tapped_sites

    layers = compat_model.structures(EngineArgs(model=str(parallel)))
    with pytest.raises(UsageError, match=f"--sites: got {site}.*{why}"):
        tapped_sites([site], layers)


COMPILED_LAYERS = """
import sys

import torch

torch.compile(lambda x: 2 * x + 1)(torch.ones(8))  # its threads are not in a fork of this process
from vllm.engine.arg_utils import EngineArgs

from capflow_engine.compat import model

print(len(model.structures(EngineArgs(model=sys.argv[1]))))
"""


@pytest.mark.long
def test_a_model_with_compiled_parts_is_read_also_after_the_process_compiled_something(tmp_path):
    config = transformers.CohereConfig(**SMALL, eos_token_id=2)
    model = only_a_configuration(tmp_path / "cohere", config, "CohereForCausalLM")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-c", COMPILED_LAYERS, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert done.stdout.split()[-1:] == ["3"], done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize(("site", "why"), NOT_THERE)
def test_refuses_sites_that_are_not_there(parallel, site, why):
    refused(sites(parallel, "--sites", site), "--sites", f"got {site}", why)


@pytest.mark.long  # test_compat.py asks for such models in its own process
def test_refuses_a_model_that_is_not_there(tmp_path):
    refused(sites(tmp_path / "nowhere"), f"model {tmp_path / 'nowhere'}", "a directory with a config.json")


@pytest.mark.long
def test_refuses_a_model_that_vllm_does_not_implement(tmp_path):
    config = transformers.GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]], hidden_size=64, num_heads=2)
    refused(sites(only_a_configuration(tmp_path, config, "GPTNeoForCausalLM")), "GPTNeoForCausalLM", "not supported")
