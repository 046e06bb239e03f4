"""Engines with gates: a hub of this process that runs them, and what requests and rows come of it."""

from __future__ import annotations

import collections
import contextlib

import numpy as np

import capflow
from capflow.capture.site import Site
from capflow.plugins.configure import ConfiguredController, configure, load_plugins, parse
from capflow.probes.probe import Probe, save_vector
from tests.kit.engines import GREEDY, answers, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, FLOAT32_BOUND, Keeper
from tests.kit.waiting import eventually

PROBED, STEERED = Site(2, "post_block"), Site(1, "post_block")
WEIGHT = vector(11, norm=1.0)
LENGTHS = (60, 61, 62, 63, 58, 59)
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192}
"""Room for about four requests of 160 tokens, so that six which grow to that preempt each other."""


def gates(directory, *options, steered=STEERED, probed=PROBED):
    """Return gates as a hub takes them; `options` is one text for each, with its name: `@rude:threshold=1`."""
    Probe.make(probed, WEIGHT, names=("p",), threshold=1e9).save(directory / "p.safetensors")
    save_vector(directory / "v.safetensors", steered, vector(12))
    made = []
    for each in options:
        name, _, more = each.partition(":")
        positions = "" if "positions=" in more else ",positions=all_generated"
        files = f"probe={directory}/p.safetensors,vector={directory}/v.safetensors{positions}"
        configured = configure(*parse(f"gate{name}:{files},{more}"), load_plugins())
        assert isinstance(configured, ConfiguredController)
        made.append(configured)
    return made


@contextlib.contextmanager
def ahead_of_output(ahead):
    """Let engines schedule steps before the output of `ahead - 1` earlier ones; vLLM's CPU platform turns this off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.__dict__["check_and_update_config"]

    def check(cls, vllm_config):
        original.__get__(None, cls)(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if ahead:
        platform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        platform.check_and_update_config = original


def run(tiny, tmp_path_factory, controllers, *, lengths=LENGTHS, max_tokens=100, captured=ALL, ahead=0, **arguments):
    """Return the keeper of a hub with controllers, and the outputs of requests `r0`, `r1` and so on.

    ahead: how many steps async scheduling keeps under way; 0 for sync scheduling.
    """
    keeper = Keeper()
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    hubs = running_hub(address, keeper, controllers=controllers)
    with hubs as hub, ahead_of_output(ahead), engine(tiny, hub=address, **arguments) as llm:
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        keeper.preempted = []
        if ahead:
            assert type(core.scheduler).__mro__[2].__name__ == "AsyncScheduler"
            core.batch_queue_size = ahead
            core.batch_queue = collections.deque(maxlen=ahead)
            core.step_fn = core.step_with_batch_queue
        if core is not None:
            scheduler = core.scheduler
            preempt = scheduler._preempt_request
            scheduler._preempt_request = lambda request, *a, **k: (
                keeper.preempted.append(request.request_id.partition("-")[0]),
                preempt(request, *a, **k),
            )[1]
        params = [
            capflow.sampling_params(id=f"r{n}", capture=captured, max_tokens=max_tokens, **GREEDY)
            for n in range(len(lengths))
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == len(lengths))
        keeper.problems = list(hub.status()["problems"])
    assert not keeper.late
    assert not keeper.twice
    return keeper, outputs


def scores(keeper, name):
    """Return the probe's score of each captured position of a request."""
    return {position: float(row @ WEIGHT) for position, (_, row) in keeper.rows[name][PROBED].items()}


def first_above(keeper, name, threshold, start):
    each = scores(keeper, name)
    return next((p for p in sorted(each) if p >= start and each[p] >= threshold), None)


def hold(keeper, name, output, reference, steering):
    """Hold a request's rows against the reference with vectors added from positions on: `{layer: (vector, first)}`."""
    tokens = [*output.prompt_token_ids, *answers([output])[0]]
    expected = reference.post_block(tokens, steering)
    for site, kept in keeper.rows[name].items():
        at = sorted(kept)
        assert at == list(range(len(at)))
        assert relative_error(np.stack([kept[p][1] for p in at]), expected[site.layer, at]) < FLOAT32_BOUND
