"""What is read from vLLM's routers, of those for GPUs too, against the choice of those that run here."""

import numpy as np
import pytest
import torch

import capflow
from capflow_engine.compat.model import router_choice

pytestmark = pytest.mark.engine

EXPERTS, TOP = 8, 3
BIAS = torch.linspace(-0.2, 0.2, EXPERTS)
PICKED = {"top_k": TOP, "global_num_experts": EXPERTS}
GROUPS = {"num_expert_group": 4, "topk_group": 2}


def made(name, **fields):
    from vllm.model_executor.layers.fused_moe.router import (
        cpu_router,
        custom_routing_router,
        fused_topk_bias_router,
        fused_topk_router,
        grouped_topk_router,
        routing_simulator_router,
    )

    modules = (
        cpu_router, custom_routing_router, fused_topk_bias_router, fused_topk_router, grouped_topk_router,
        routing_simulator_router,
    )  # fmt: skip
    kinds = {kind: each for module in modules for kind, each in vars(module).items()}
    return kinds[name](**PICKED, **fields)


def sigmoids():
    from vllm.model_executor.models.llama4 import Llama4MoE

    return Llama4MoE.custom_routing_function


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("CPURouter", {}),
        ("CPURouter", {"e_score_correction_bias": BIAS, "routed_scaling_factor": 3.0}),  # which it leaves out
        ("CPURouter", {"use_grouped_topk": True, **GROUPS, "routed_scaling_factor": 3.0}),
        ("CPURouter", {"use_grouped_topk": True, **GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS}),
        ("GroupedTopKRouter", {**GROUPS, "routed_scaling_factor": 3.0}),
        ("GroupedTopKRouter", {**GROUPS, "scoring_func": "sigmoid", "e_score_correction_bias": BIAS}),
        ("GroupedTopKRouter", {"num_expert_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}),
    ],
)
def test_a_choice_that_is_read_is_the_routers_own(name, fields, renormalize):
    router = made(name, renormalize=renormalize, **fields)
    form = capflow.RouterForm(TOP, renormalised=renormalize, **router_choice(router, EXPERTS))
    torch.manual_seed(3)
    logits = torch.randn(50, EXPERTS)
    with torch.compiler.set_stance("force_eager"):
        weights, ids = router._compute_routing(torch.zeros(50, 4), logits, None)
    given = {"bias": BIAS.numpy()} if form.biased else {}
    chosen = capflow.chosen_experts(logits.numpy(), form, **given)
    order = np.argsort(-weights.numpy(), axis=1)
    assert np.array_equal(chosen.ids, np.take_along_axis(ids.numpy(), order, 1))
    assert np.abs(chosen.weights - np.take_along_axis(weights.numpy(), order, 1)).max() < 1e-6


def test_choices_of_routers_that_do_not_run_here():
    plain = made("FusedTopKRouter", scoring_func="sigmoid", renormalize=False)
    assert router_choice(plain, EXPERTS) == {"scores": "sigmoid"}
    biased = made("FusedTopKBiasRouter", e_score_correction_bias=BIAS, routed_scaling_factor=2.5)
    assert router_choice(biased, EXPERTS) == {"scores": "sigmoid", "biased": True, "scale": 2.5}
    assert router_choice(made("CustomRoutingRouter", custom_routing_function=sigmoids()), 8) == {"scores": "sigmoid"}


@pytest.mark.parametrize(
    ("name", "fields", "lacks"),
    [
        ("FusedTopKBiasRouter", {"scoring_func": "sqrtsoftplus", "e_score_correction_bias": BIAS}, "scores by sqrtsof"),
        ("FusedTopKBiasRouter", {"hash_indices_table": BIAS}, "a choice by the tokens' ids"),
        ("CPURouter", {"scoring_func": "sqrtsoftplus", "hash_indices_table": BIAS}, "scores by sqrtsoftplus"),
        ("CPURouter", {"custom_routing_function": made}, f"the choice of {__name__}.made"),
        ("GroupedTopKRouter", {"num_expert_group": 3, "topk_group": 2}, "3 groups of 8 experts"),
        ("RoutingSimulatorRouter", {}, "the choice of a RoutingSimulatorRouter"),
    ],
)
def test_a_choice_that_is_not_understood_is_named(name, fields, lacks):
    assert router_choice(made(name, **fields), EXPERTS).pop("lacks").startswith(lacks)
