"""An engine with two hubs: the rows of each request are complete in one hub, even while the other restarts."""

from __future__ import annotations

import contextlib
import itertools
import signal
import tempfile
import time
from pathlib import Path

import pytest

import capflow
from capflow import limits
from capflow.capture.spec import CaptureSpec
from capflow.errors import HubUnreachableError
from capflow.protocol.routing import hub_of
from capflow.transport.client import Client
from tests.kit.engines import GREEDY, answers, engine, prompts
from tests.kit.hubs import address, configured, running_hub
from tests.kit.rows import ALL, Keeper, check_rows
from tests.kit.servers import environment, process
from tests.kit.waiting import eventually

__all__ = ["address"]

pytestmark = pytest.mark.engine

LENGTHS = [5, 40, 17, 3, 9, 22, 31, 1]


def names(prefix, hub=None):
    """Return a name for each prompt; of one hub's requests only, if it is named."""
    candidates = (f"{prefix}{number}" for number in itertools.count())
    return list(itertools.islice((name for name in candidates if hub in (None, hub_of(name, 2))), len(LENGTHS)))


def generate(llm, called, **more):
    params = [capflow.sampling_params(id=name, max_tokens=12, **GREEDY, **more) for name in called]
    outputs = llm.generate(prompts(LENGTHS), params, use_tqdm=False)
    return dict(zip(called, outputs, strict=True))


def tokens_of(output):
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


# `capflow` of a release whose wire protocol has another version.
OTHER_RELEASE = """
from capflow.capture import frame
frame.PROTOCOL_VERSION += 1
from capflow.cli import main
main()
"""


class HubThatDies:
    """`capflow run` with a filesystem consumer, which can be killed and started again."""

    def __init__(self, home, name):
        self.address = f"ipc://{home}/{name}"
        self.root = Path(home) / f"rows-{name}"
        self._environment = environment(home)

    def running(self, *options, release=("-m", "capflow")):
        return process(
            *("run", "--address", self.address, "--consumer", f"filesystem:root={self.root}", *options),
            environment=self._environment,
            python=release,
        )

    def wait(self):
        def answers_now():
            try:
                with Client(self.address, timeout=0.2):
                    return True
            except HubUnreachableError:
                return False

        eventually(answers_now, 30)


def engine_of(running, model, *hubs, **more):
    """Start an engine of hubs, once they answer."""
    for hub in hubs:
        hub.wait()
    return running.enter_context(engine(model, hub=[hub.address for hub in hubs], **more))


def end(running, number=signal.SIGINT):
    running.send_signal(number)
    running.wait(60)


def test_each_request_is_whole_in_its_hub_and_one_that_dies_holds_up_no_other(tiny, reference, tmp_path):
    with tempfile.TemporaryDirectory(prefix="cf") as home, contextlib.ExitStack() as running:
        first, second = HubThatDies(home, "a"), HubThatDies(home, "b")
        with first.running() as (one, _):
            with second.running() as (two, _):
                llm = engine_of(running, tiny, first, second, policy="spill", spool_dir=str(tmp_path))
                before = generate(llm, names("before"))
                for output in before.values():
                    assert output.capture_results["filesystem"].status == "ok"
                end(two, signal.SIGKILL)
            begun = time.monotonic()
            alone = generate(llm, names("alone", 0))
            took_s = time.monotonic() - begun
            assert all(output.capture_results["filesystem"].status == "ok" for output in alone.values())
            meanwhile = generate(llm, names("meanwhile"))
            with second.running() as (two, _):
                second.wait()
                after = generate(llm, names("after"))
                every = before | alone | meanwhile | after
                theirs = sorted(name for name in every if hub_of(name, 2))
                eventually(lambda: sorted(capflow.open(second.root).requests()) == theirs, 30)
                running.close()
                end(two)
            end(one)
        assert answers(alone.values()) == answers(meanwhile.values()) == answers(before.values())
        assert took_s < 25, "the hub that is gone is waited for by nobody"
        roots = [capflow.open(first.root), capflow.open(second.root)]
        for name, output in every.items():
            hub = hub_of(name, 2)
            assert name not in roots[1 - hub]
            check_rows(roots[hub][name], tokens_of(output), reference)
        assert 4 < sum(name in roots[0] for name in before) + sum(name in roots[0] for name in after) < 12
        assert not any(tmp_path.iterdir()) or not any((tmp_path / "hub-1").iterdir())


def test_a_hub_that_hands_over_loses_no_request_and_has_its_share_again_when_it_is_back(tiny, reference):
    """With the policy `drop`, so that whatever is sent to a hub that is gone is lost."""
    with tempfile.TemporaryDirectory(prefix="cf") as home, contextlib.ExitStack() as running:
        first, second = HubThatDies(home, "a"), HubThatDies(home, "b")
        with first.running() as (one, _):
            with second.running("--handover-s", "50") as (two, lines):
                llm = engine_of(running, tiny, first, second, policy="drop")
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler.capflow
                early, late = names("early"), names("late")
                params = [capflow.sampling_params(id=name, max_tokens=40, **GREEDY) for name in early]
                llm.enqueue(prompts(LENGTHS), params, use_tqdm=False)
                for _ in range(3):
                    llm.llm_engine.step()
                two.send_signal(signal.SIGTERM)
                eventually(lambda: scheduler.links.in_service(2) == [0])
                params = [capflow.sampling_params(id=name, max_tokens=12, **GREEDY) for name in late]
                llm.enqueue(prompts(LENGTHS), params, use_tqdm=False)
                assert two.poll() is None
                outputs = dict(zip(early + late, llm.wait_for_completion(use_tqdm=False), strict=True))
                two.wait(30)
            assert two.returncode == 0
            assert any("capflow: handing over" in line for line in lines)
            assert "capflow: handed over" in lines
            gone = generate(llm, names("gone"))
            with second.running() as (two, _):
                eventually(lambda: scheduler.links.in_service(2) == [0, 1])
                back = generate(llm, names("back"))
                running.close()
                end(two)
            end(one)
        roots = [capflow.open(first.root), capflow.open(second.root)]
        for name, output in (outputs | gone | back).items():
            hub = hub_of(name, 2) if name in early or name in back else 0
            assert name not in roots[1 - hub]
            assert output.capture_results["filesystem"].status == "ok", name
            check_rows(roots[hub][name], tokens_of(output), reference)
        assert sum(name in roots[1] for name in early) > 1
        assert sum(name in roots[1] for name in back) > 1


def test_rows_wait_in_the_spool_for_a_hub_of_another_release(tiny, reference, tmp_path):
    """As while the hubs of an engine are updated: the one refuses until it speaks the engine's protocol again."""
    with tempfile.TemporaryDirectory(prefix="cf") as home, contextlib.ExitStack() as running:
        first, second = HubThatDies(home, "a"), HubThatDies(home, "b")
        with first.running() as (one, _):
            with second.running() as (two, _):
                llm = engine_of(running, tiny, first, second, policy="spill", spool_dir=str(tmp_path))
                before = generate(llm, names("before"))
                end(two)
            worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.capflow
            link = worker.outlets.links[1]
            with second.running(release=("-c", OTHER_RELEASE)) as (two, _):
                eventually(lambda: link.refusal is not None)
                assert "version of the wire protocol: got 1, expected 2" in link.refusal
                refused = generate(llm, names("refused", 1))
                assert not link.counters["dropped_frames"]
                assert link.counters["spool"]["frames_spilled"] > 0
                end(two)
            with second.running() as (two, _):
                eventually(lambda: link.connected and link.drained)
                after = generate(llm, names("after"))
                running.close()
                end(two)
            end(one)
        assert two.returncode == one.returncode == 0
        roots = [capflow.open(first.root), capflow.open(second.root)]
        for name, output in (before | refused | after).items():
            check_rows(roots[hub_of(name, 2)][name], tokens_of(output), reference)


def test_each_hub_has_what_it_asked_for_of_its_own_requests(tiny, reference, tmp_path):
    class Own(Keeper):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def spec(self):
            return CaptureSpec({"post_block": self.layers})

    first, second = Own([0]), Own([1, 3])
    with tempfile.TemporaryDirectory(prefix="cf") as home:
        addresses = [f"ipc://{home}/a", f"ipc://{home}/b"]
        with (
            running_hub(addresses[0], configured(first)),
            running_hub(addresses[1], configured(second)),
            engine(tiny, hub=addresses) as llm,
        ):
            called = names("r")
            outputs = generate(llm, called)
            asked = generate(llm, names("own"), capture=ALL)
    for name, output in outputs.items():
        keeper, other = (second, first) if hub_of(name, 2) else (first, second)
        assert name not in other.rows
        assert output.capture_results["keeper"].status == "ok"
        sites = [capflow.Site(layer, "post_block") for layer in keeper.layers]
        keeper.hold(name, tokens_of(output), reference, sites=sites)
    for name, output in asked.items():
        (second if hub_of(name, 2) else first).hold(name, tokens_of(output), reference)
    assert len(first.done) + len(second.done) == 2 * len(LENGTHS)
    assert min(len(first.done), len(second.done)) > 3


def test_a_hub_that_starts_later_has_its_share_of_new_requests(tiny, reference):
    """A request that runs then stays with its hub."""
    first, later = Keeper(), Keeper()
    with tempfile.TemporaryDirectory(prefix="cf") as home:
        addresses = [f"ipc://{home}/a", f"ipc://{home}/b"]
        with (
            running_hub(addresses[0], configured(first)),
            engine(tiny, hub=addresses[0], spare_hubs=addresses[1:]) as llm,
        ):
            early = names("early")
            params = [capflow.sampling_params(id=name, max_tokens=12, capture=ALL, **GREEDY) for name in early]
            llm.enqueue(prompts(LENGTHS), params, use_tqdm=False)
            for _ in range(3):
                llm.llm_engine.step()
            assert set(early) - set(first.done)
            with running_hub(addresses[1], configured(later)):
                links = llm.llm_engine.engine_core.engine_core.scheduler.capflow.links
                eventually(lambda: all(links.welcomes))
                before = dict(zip(early, llm.wait_for_completion(use_tqdm=False), strict=True))
                after = generate(llm, names("late"), capture=ALL)
    for name, output in (before | after).items():
        hub = hub_of(name, 2) if name in after else 0
        keeper, other = (later, first) if hub else (first, later)
        assert name not in other.rows
        assert output.capture_results["keeper"].status == "ok"
        assert output.steering_applied is None
        keeper.hold(name, tokens_of(output), reference)
    assert len(later.done) > 1


def test_a_hub_that_is_gone_is_waited_for_once_and_not_at_every_step(tiny, address, monkeypatch):
    monkeypatch.setattr(limits, "BLOCK_S_MAX", 2.0)
    with running_hub(address, Keeper()) as hub, engine(tiny, hub=hub.address) as llm:
        capture = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.capflow
        before = generate(llm, names("before"), capture=ALL)
        capture.ring.bytes_max = 1  # no step has room beside another
        hub.stop(20)
        (link,) = capture.outlets.links
        eventually(lambda: not link.connected)
        begun = time.monotonic()
        gone = generate(llm, names("gone"), capture=ALL)
        took_s = time.monotonic() - begun
    assert answers(gone.values()) == answers(before.values())
    assert 2.0 < took_s < 20.0
