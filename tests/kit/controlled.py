"""Engines with gates: a hub of this process that runs them, and what requests and rows come of it."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.plugins.configure import ConfiguredController, configure, load_plugins, parse
from capflow.probes.probe import Probe, save_vector
from tests.kit.engines import GREEDY, answers, async_scheduling, engine, prompts, relative_error, vector
from tests.kit.hubs import running_hub
from tests.kit.rows import ALL, FLOAT32_BOUND, Keeper
from tests.kit.waiting import eventually
from tests.kit.watching import watch

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


def mostly_long(cases, *quick):
    """Return the parameters of a test by their ids: all but `quick` are marked `long`."""
    marked = {name: () if name in quick else pytest.mark.long for name in cases}
    return [pytest.param(*case, id=name, marks=marked[name]) for name, case in cases.items()]


def ahead_of_output(ahead):
    """Let engines schedule steps before the output of `ahead - 1` earlier ones."""
    return async_scheduling() if ahead else contextlib.nullcontext()


def run(
    tiny,
    tmp_path_factory,
    controllers,
    *,
    lengths=LENGTHS,
    max_tokens=100,
    captured=ALL,
    ahead=0,
    asked=lambda n: {},
    resets=0,
    **arguments,
):
    """Return the keeper of a hub with controllers, and the outputs of requests `r0`, `r1` and so on.

    ahead: how many steps async scheduling keeps under way; 0 for sync scheduling.
    asked: returns what request number `n` asks for besides.
    resets: after how many steps all requests are preempted and their steps under way are dropped; 0: never.
    """
    keeper = Keeper()
    address = f"ipc://{tmp_path_factory.mktemp('h')}/h"
    hubs = running_hub(address, keeper, controllers=controllers)
    with hubs as hub, ahead_of_output(ahead), engine(tiny, hub=address, **arguments) as llm:
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        keeper.preempted, keeper.counts = [], {}
        if ahead:
            assert "AsyncScheduler" in {kind.__name__ for kind in type(core.scheduler).__mro__}
            core.batch_queue_size = ahead
            core.batch_queue = collections.deque(maxlen=ahead)
            core.step_fn = core.step_with_batch_queue
        if core is not None:
            scheduler = core.scheduler
            keeper.counts = watch(llm)
            if resets:
                _reset_every(scheduler, resets)
            preempt = scheduler._preempt_request
            scheduler._preempt_request = lambda request, *a, **k: (
                keeper.preempted.append(request.request_id.partition("-")[0]),
                preempt(request, *a, **k),
            )[1]
        params = [
            capflow.sampling_params(id=f"r{n}", capture=captured, **{"max_tokens": max_tokens, **GREEDY, **asked(n)})
            for n in range(len(lengths))
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == sum(each.n for each in params))
        keeper.problems = list(hub.status()["problems"])
    assert not keeper.late
    assert not keeper.twice
    return keeper, outputs


def _reset_every(scheduler, steps):
    """Preempt all running requests every so many steps, and drop the output of their steps under way."""
    schedule, scheduled = scheduler.schedule, [0]

    def schedule_after_reset(*args, **kwargs):
        scheduled[0] += 1
        if scheduled[0] % steps == 0:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    scheduler.schedule = schedule_after_reset


def scores(keeper, name, site=PROBED):
    """Return the probe's score of each captured position of a request."""
    return {position: float(row @ WEIGHT) for position, (_, row) in keeper.rows[name][site].items()}


def first_above(keeper, name, threshold, start, site=PROBED):
    each = scores(keeper, name, site)
    return next((p for p in sorted(each) if p >= start and each[p] >= threshold), None)


def hold_ends(keeper, outputs, reference, threshold, status, by, *, site=PROBED, name="r", length=60):
    """Hold the ends of requests `r0`, `r1` and so on whose answers a probe ends; return how many it ended.

    by: the gate or controller, as in stop reasons.
    name: the letter that names of requests begin with.
    length: the most tokens of an answer.
    """
    fired = 0
    for n, output in enumerate(outputs):
        for number, answer in enumerate(output.outputs):
            own = f"{name}{n}" if len(output.outputs) == 1 else f"{name}{n}#{number}"
            ends = [event for event in keeper.events_of(own) if event.kind == "abort"]
            fired += len(ends)
            start = len(output.prompt_token_ids)
            first = first_above(keeper, own, threshold, start, site)
            last = start + len(answer.token_ids) - 2 if first is None else first
            _hold(keeper, own, [*output.prompt_token_ids, *answer.token_ids], reference, {})
            assert sorted(keeper.rows[own][site]) == list(range(last + 1)), own
            if first is None or first + 2 - start == length:
                assert (len(answer.token_ids), answer.finish_reason) == (length, "length"), own
                assert not ends
                continue
            assert len(answer.token_ids) == first + 2 - start, own
            assert answer.finish_reason == keeper.done[own].status == status
            prefix, _, score = answer.stop_reason.rpartition(":")
            assert prefix == f"capflow:{by}"
            assert float(score) == pytest.approx(scores(keeper, own, site)[first], rel=1e-4)
            (event,) = ends
            assert event.threshold == pytest.approx(threshold)
    return fired


def hold(keeper, name, output, reference, steering):
    """Hold a request's rows against the reference with vectors added from positions on: `{layer: (vector, first)}`."""
    _hold(keeper, name, [*output.prompt_token_ids, *answers([output])[0]], reference, steering)


def _hold(keeper, name, tokens, reference, steering):
    expected = reference.post_block(tokens, steering)
    for site, kept in keeper.rows[name].items():
        at = sorted(kept)
        assert at == list(range(len(at)))
        assert relative_error(np.stack([kept[p][1] for p in at]), expected[site.layer, at]) < FLOAT32_BOUND
