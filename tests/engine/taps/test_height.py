"""A tap that is given other rows than the step's tokens ends the engine's first forward pass and names its site."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow_engine.compat import model as compat_model
from capflow_engine.layer.structure import HookPlace
from capflow_engine.taps import height
from tests.kit.engines import engine, prompts
from tests.kit.sources import KIT, ROOT


class Model(nn.Module):
    """Taps what `shared` makes of a stream of as many rows as there are positions."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.site = shared, torch.zeros(1, dtype=torch.int32)

    def forward(self, positions):
        stream = torch.zeros(positions.shape[-1], 4)
        height.check(self.shared(stream), self.site)


@pytest.fixture
def watched():
    def make(shared):
        model = Model(shared)
        height.register(model.site, "mlp_out:7", 4)
        height.watch(model)
        return model

    return make


@pytest.mark.parametrize("positions", [torch.zeros(6), torch.zeros(3, 6)], ids=["plain", "three axes"])
def test_the_rows_of_all_tokens_are_right(watched, positions):
    watched(lambda stream: stream)(positions=positions)


def test_other_rows_are_refused_with_the_name_of_the_site(watched):
    model = watched(lambda stream: stream[: (len(stream) + 1) // 2])
    with pytest.raises(CapflowError, match="site mlp_out:7: got 3 rows, expected 6, one for each token of the step;"):
        model(positions=torch.zeros(6))
    height.check(torch.zeros(3, 4), model.site)  # a forward pass that failed is over


def test_rows_of_another_width_are_refused_with_the_name_of_the_site(watched):
    model = watched(lambda stream: stream[:, :3])
    expected = "site mlp_out:7: got rows of 3 numbers, expected 4 numbers; leave the site out of --sites"
    with pytest.raises(CapflowError, match=expected):
        model(positions=torch.zeros(6))
    with pytest.raises(CapflowError, match=expected):  # also where the step's tokens are unknown
        model(torch.zeros(6))


def test_a_model_whose_tokens_are_unknown_is_not_checked(watched):
    model = watched(lambda stream: stream[:1])
    height.check(torch.zeros(3, 4), model.site)
    model(torch.zeros(6))


@pytest.fixture
def sharded(monkeypatch):
    """Let each MLP compute its tokens in two halves, as two ranks would; `mlp_out` lies in the first half."""
    from vllm.model_executor.models.llama import LlamaMLP

    whole = LlamaMLP.forward

    def halves(self, x):
        size = (x.shape[0] + 1) // 2
        first = self.own(x[:size])
        return torch.cat([first, whole(self, x[size:])])

    class Own(nn.Module):
        def __init__(self, mlp):
            super().__init__()
            self.mlp = [mlp]

        def forward(self, x):
            return whole(self.mlp[0], x)

    def owned_sites(model, info, dtype):
        layer = compat_model.decoder_layers(model, info.num_layers)[2][1]
        for _, each in compat_model.decoder_layers(model, info.num_layers):
            each.mlp.own = Own(each.mlp)
        yield Site(2, "mlp_out"), layer, HookPlace("mlp.own")

    monkeypatch.setattr(LlamaMLP, "forward", halves)
    monkeypatch.setattr(compat_model, "owned_sites", owned_sites)


@pytest.mark.engine
@pytest.mark.parametrize(
    "eager", [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.timeout(300)])], ids=["eager", "compiled"]
)
def test_a_layer_that_holds_a_part_of_the_tokens_ends_the_first_forward_pass(tiny, keeper, sharded, eager):
    with (
        pytest.raises(CapflowError, match=r"site mlp_out:2: got \d+ rows, expected \d+, one for each token"),
        engine(tiny, hub=keeper.address, sites=["mlp_out:2"], enforce_eager=eager) as llm,
    ):
        llm.generate(prompts([9]), use_tqdm=False)


@pytest.mark.long
def test_the_v2_runner_is_checked_too():
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(KIT / "triton_cpu"), os.environ.get("PYTHONPATH", "")])
    test = f"{__file__}::test_a_layer_that_holds_a_part_of_the_tokens_ends_the_first_forward_pass[eager]"
    command = [sys.executable, "-m", "pytest", "-q", test]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
