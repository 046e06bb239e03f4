"""Controllers in a worker: what a plugin does wrong is refused, counted and told, and ends no step."""

import logging
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from capflow import limits
from capflow.capture.model import grouped
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError
from capflow.hub.health import problems
from capflow.plugins.configure import ConfiguredController
from capflow.plugins.consumer import Controller, Decision, NoConfig, StepProbe
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import Abort, Steer, Unsteer
from capflow.steering.vector import SteeringVector
from capflow.transport.links.worker import Staged
from capflow_engine.scheduler.decisions import Decisions
from capflow_engine.scheduler.orders import Decided, FreezeOrder, News, StepAnswer, decode, encode
from capflow_engine.steering.budget import Size
from capflow_engine.taps.bank import Bank
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.changes import Changes
from capflow_engine.worker.control import controllers as control
from capflow_engine.worker.control.controllers import Controllers
from capflow_engine.worker.control.deciding import Deciding, Scored
from capflow_engine.worker.control.scoring import ProbeScorer
from capflow_engine.worker.control.view import Shown
from capflow_engine.worker.events import Events
from capflow_engine.worker.history import Histories, Owner
from capflow_engine.worker.pending import Pending
from tests.kit.frames import make_hello, make_model
from tests.kit.hubs import address, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

HEADS = Site(1, "heads")
SITES = tuple(Site(layer, "post_block") for layer in range(4))
MODEL = msgspec.structs.replace(make_model(num_layers=4), sites=(*SITES, HEADS), shapes=grouped({HEADS: (2, 3)}))
READ = CaptureSpec({"post_block": [1]})
ONE, TWO = (SteeringVector.make(Site(layer, "post_block"), np.ones(8)) for layer in (1, 2))
STEER = Steer("r", (TWO,))


class Told(Controller):
    """Does what a test says: raises it, or returns it."""

    name = "told"
    Config = State = NoConfig
    step = ()
    opens = steers_at = done = capture = None

    @classmethod
    def load(cls, config):
        return config

    def spec(self):
        return _do(self.capture or READ)

    def steers(self):
        return _do(self.steers_at or ())

    def open(self, model):
        _do(self.opens)

    def on_step(self, view):
        return _do(self.step)

    def on_request_done(self, request):
        _do(self.done)


def _do(outcome):
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


@pytest.fixture
def started(monkeypatch):
    """Start a controller that behaves as given, in a stage that has these layers."""

    def start(layers=range(4), mode="replicated", last=True, **behaviour):
        kind = type("Told", (Told,), behaviour)
        monkeypatch.setattr(control, "load_plugins", lambda: {"told": kind})
        spec = ControllerSpec("told", msgspec.msgpack.encode(NoConfig()), "", behaviour.get("capture", READ), mode=mode)
        sites = tuple(Site(layer, "post_block") for layer in layers)
        return Controllers([spec], MODEL, sites, 0, last=last), kind

    return start


def step(*batch, rows=None, ends=None, number=1):
    """Return a step with a batch of requests, `(tracked, first position, tokens)`, as controllers see it."""
    row, parts = 0, []
    for tracked, start, length in batch:
        parts.append(Scheduled(tracked, row, start, length))
        row += length
    return Shown(number, Planner(4).plan(parts), rows, ends or {})


def run(controllers, shown=None, **more):
    """Return the actions of a step of request `r`, as if it held no actions before."""
    controllers.take_back()
    decided = controllers.run(shown or step(), {"r": "key"}, **more)
    assert decode(encode(decided)) == decided
    assert all(each[:3] == ("key", 0, 0) for each in decided)
    return [each.action for each in decided]


def half():
    yield STEER
    raise RuntimeError("midway")


def endless():
    while True:
        yield STEER


def wrong_vector(**fields):
    return Steer("r", (msgspec.structs.replace(TWO, **fields),))


FAILS = {
    "raises": (ValueError("no"), "ValueError"),
    "exits": (SystemExit(3), "SystemExit"),
    "returns nothing": (None, "TypeError"),
    "returns a number": (3, "TypeError"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_controller_that_fails_is_counted_and_reported_and_disabled_in_the_end(started, case, caplog):
    wrong, error = FAILS[case]
    controllers, kind = started(step=wrong)
    kind.on_step = (lambda self, view: wrong) if wrong is None else kind.on_step
    assert controllers.troubles == ()
    for times in range(1, limits.CONTROLLER_FAILURES_MAX):
        assert run(controllers) == []
        assert controllers.troubles[0].startswith(f"controller told: failed in its last {times} steps ({error})")
    assert sum("Traceback" in (record.exc_text or "") for record in caplog.records) == 1
    assert len(caplog.records) < 6
    run(controllers)
    failures = f"failed {limits.CONTROLLER_FAILURES_MAX} times in a row ({error})"
    assert controllers.troubles[0] == f"controller told: disabled: {failures}"
    kind.on_step = lambda self, view: [STEER]
    assert run(controllers) == []


def test_a_controller_that_does_better_is_no_trouble_any_more(started):
    controllers, kind = started(step=ValueError("no"))
    for _ in range(3 * limits.CONTROLLER_FAILURES_MAX):
        kind.step = ValueError("no")
        run(controllers)
        kind.step = [STEER]
        assert run(controllers) == [STEER]
        assert controllers.troubles == ()


def test_a_generator_that_fails_midway_has_none_of_its_actions_done(started):
    controllers, kind = started()
    kind.on_step = lambda self, view: half()
    assert run(controllers) == []
    assert "RuntimeError" in controllers.troubles[0]
    kind.on_step = lambda self, view: endless()
    assert run(controllers) == []
    assert "UsageError" in controllers.troubles[0]


REFUSED = {
    "a string for a layer": (wrong_vector(layer="2"), "Expected `int`, got `str`"),
    "a layer that the model lacks": (wrong_vector(layer=9), "got layer 9, expected 0..3"),
    "a site without a tap": (wrong_vector(hook="mlp_out"), "got no tap at mlp_out:2"),
    "a vector of another width": (wrong_vector(data=np.ones(4, np.float32).tobytes()), "got 4 numbers, expected 8"),
    "a vector with NaN": (wrong_vector(data=np.full(8, np.nan, np.float32).tobytes()), "got NaN or infinity"),
    "a scale of NaN": (wrong_vector(scale=float("nan")), "got NaN or infinity"),
    "a dtype that is none": (wrong_vector(dtype="int3"), "dtype: got int3"),
    "an array for a vector": (Steer("r", (np.ones(8),)), "TypeError"),
    "data that are no bytes": (wrong_vector(data=np.ones(8)), "Error"),
    "vectors that are none": (Steer("r", None), "Expected `array`, got"),
    "a request that does not run": (Steer("nobody", (TWO,)), "request: got one that is not running"),
    "a request that is no name": (Steer([], (TWO,)), "TypeError"),
    "an abort": (Abort("r"), "got Abort of a replicated controller; set mode=ordered"),
    "something else": ("steer r", "got str, expected Steer, Unsteer, Gain, SetGate, Abort and Decision"),
    "a decision for another request": (Decision("r", Unsteer("q")), "another request than its action's"),
    "a decision with a score of NaN": (Decision("r", STEER, score=float("nan")), "score: got NaN or infinity"),
    "a decision at no position": (Decision("r", STEER, position="first"), "ValueError"),
    "a decision at a position below 0": (Decision("r", STEER, position=-1), "position: got -1, expected a position"),
    "a decision at a position beyond all": (Decision("r", STEER, position=1 << 40), "ValidationError"),
    "a label that is too long": (Decision("r", STEER, label="x" * 600), "ValidationError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_action_that_is_none_or_does_not_fit_is_refused_and_the_others_are_done(started, case, caplog):
    wrong, words = REFUSED[case]
    controllers, kind = started(step=[wrong, STEER])
    for times in range(1, 20):
        assert run(controllers) == [STEER]
        assert controllers.troubles[0].startswith(f"controller told: refused actions: {times}; the last: ")
        assert words in controllers.troubles[0]
    assert len(caplog.records) == 5  # at 1, 2, 4, 8 and 16
    kind.step = [STEER]
    run(controllers)
    controllers.done(0, "key", None)  # the worker did one
    assert controllers.troubles == ()


def test_an_action_for_which_there_is_no_room_is_told(started):
    controllers, _ = started(step=[STEER])
    controllers.done(0, "key", CapflowError("steering bank: got no room"))
    assert controllers.troubles == ("controller told: refused actions: 1; the last: steering bank: got no room",)


def actions_of(controllers, shown=None):
    return [each.action for each in controllers.run(shown or step(), {"r": "key"})]


@pytest.mark.parametrize("mode", ["replicated", "ordered"])
def test_an_action_that_meets_a_freeze_is_counted_and_no_trouble(started, mode, caplog):
    controllers, kind = started(step=[STEER], mode=mode, capture=CaptureSpec({"post_block": [3]}))
    size, plan = Size(8, 8, 8), Planner(4).nothing
    bank = Bank(size.plus(size), {TWO.site: 0}, MODEL.hidden_size, torch.device("cpu"))
    histories, requests = Histories(bank, size, MODEL), {"key": Tracked("key", "r", 4, plan, plan)}
    changes = Changes(requests, histories, [controllers], Events(Pending()), first=True, last=True)

    def decided():
        return controllers.run(step(), {"r": "key"}, ordered=mode == "ordered")

    (before,) = decided()
    changes.take(News(freezes=[FreezeOrder(frozen=True, label="")]))
    changes.decide(before)
    assert [decided() for _ in range(3)] == [[], [], []]
    assert controllers.troubles == ()
    assert caplog.text == ""
    assert (controllers.counts["told"].actions, controllers.counts["told"].refused) == (0, 4)
    kind.step = [Decision("r", None, score=1.0)]
    assert [each.score for each in decided()] == [1.0]
    kind.step = [STEER, Steer("other", (TWO,))]
    assert decided() == []
    assert "refused actions: 1; the last: on_step: request: got one that is not running" in controllers.troubles[0]
    changes.take(News(freezes=[FreezeOrder(frozen=False, label="")]))
    kind.step = [STEER]
    (after,) = decided()
    changes.decide(after)
    assert controllers.troubles == ()
    assert controllers.counts["told"].actions == 1


def test_an_action_that_holds_already_is_left_out(started):
    controllers, kind = started(step=[STEER])
    assert [actions_of(controllers) for _ in range(2)] == [[STEER], []]
    kind.step = [Unsteer("r")]
    assert [actions_of(controllers) for _ in range(2)] == [[Unsteer("r")], []]
    kind.step = [STEER]
    assert actions_of(controllers) == [STEER]
    controllers.done(0, "key", CapflowError("no room"))
    assert actions_of(controllers) == [STEER]


def test_an_action_on_rows_that_others_replace_may_come_again(started):
    """The engine undid it with its rows, for example those of a rejected draft."""
    controllers, _ = started(step=[STEER])
    watched = controllers.captures(controllers.watching("r"))
    program = Planner(4).program({1: watched[0].set_of_positions()})
    tracked = Tracked("key", "r", 4, Planner(4).nothing, program)
    assert actions_of(controllers, step((tracked, 4, 3))) == [STEER]
    assert actions_of(controllers, step((tracked, 7, 1))) == []
    tracked.computed = 6
    assert actions_of(controllers, step((tracked, 6, 1))) == [STEER]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"opens": ValueError("no")}, "did not start (ValueError: no)"),
        ({"opens": UsageError("x: got 1")}, "x: got 1"),
        ({"steers_at": KeyError("k")}, "did not start (KeyError: 'k')"),
        ({"layers": range(2), "steers_at": [Site(2, "post_block")]}, "it steers at: got post_block:2, expected"),
        ({"layers": range(2), "capture": CaptureSpec({"post_block": "all"})}, "it reads: got post_block:0, post_blo"),
        ({"capture": CaptureSpec({"heads": [1]})}, "it reads: got heads:1, expected a site of the residual stream"),
    ],
    ids=["raises", "refuses", "steers raises", "steers at another stage", "reads at two stages", "reads heads"],
)
def test_a_controller_that_cannot_run_is_disabled_and_says_why(started, behaviour, words):
    controllers, _ = started(step=[STEER], **behaviour)
    assert words in controllers.troubles[0]
    assert controllers.watching("r") == ()
    assert run(controllers) == []


def test_a_controller_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(control, "load_plugins", dict)
    controllers = Controllers([ControllerSpec("told", b"\x80", "", READ)], MODEL, MODEL.sites, 0)
    assert controllers.troubles == ("controller told: disabled: not installed where the engine runs",)


@pytest.mark.parametrize("fault", [CapflowError("plugin broken cannot be loaded"), SystemExit("broken")])
def test_a_plugin_that_cannot_be_loaded_where_the_engine_runs_ends_no_step(monkeypatch, fault):
    monkeypatch.setattr(control, "load_plugins", lambda: _do(fault))
    controllers = Controllers([ControllerSpec("told", b"", "", READ)], MODEL, SITES, 0)
    assert controllers.here
    assert controllers.watching("r") == ()
    (trouble,) = controllers.troubles
    assert "broken" in trouble


def test_a_controller_runs_in_the_stage_that_has_what_it_reads(started):
    """Another stage asks nothing of it, and an action at another stage's site is refused."""
    other, _ = started(layers=range(2, 4), step=[STEER])
    assert (other.here, other.watching("r"), other.troubles, run(other)) == (False, (), (), [])
    mine, kind = started(layers=range(2), step=[STEER])
    assert (mine.here, mine.captures(mine.watching("r"))) == (True, [READ])
    assert run(mine) == []
    assert (
        "it steers at: got post_block:2, expected sites of one pipeline stage, such as this one with layers 0..1"
        in (mine.troubles[0])
    )
    kind.step = [Steer("r", (ONE,))]
    assert run(mine) == [Steer("r", (ONE,))]


def test_other_ranks_run_no_controller(monkeypatch):
    def load():
        raise AssertionError

    monkeypatch.setattr(control, "load_plugins", load)
    controllers = Controllers([ControllerSpec("told", b"\x80", "", READ)], MODEL, MODEL.sites, 0, decides=False)
    assert controllers.here
    assert controllers.watching("r") == ()
    assert run(controllers) == []
    assert decode(encode([Decided("key", 0, 0, STEER)])) == [Decided("key", 0, 0, STEER)]
    assert controllers.owner(0) == Owner(0, "told")


def test_forgetting_a_request_ends_nothing(started):
    controllers, _ = started(done=ValueError("no"))
    controllers.forget("r", "key", 1)
    assert "ValueError" in controllers.troubles[0]


@pytest.mark.parametrize("behaviour", [{"capture": ValueError("no")}, {"opens": ValueError("no")}])
def test_a_plugin_that_fails_in_the_hub_is_named(behaviour):
    controller = ConfiguredController("told@x", type("Told", (Told,), behaviour), NoConfig())
    with pytest.raises(CapflowError, match=r"controller told@x failed: got ValueError: no"):
        controller.check(MODEL)


def test_a_hub_refuses_a_controller_that_reads_rows_with_a_shape_of_their_own():
    reader = type("Told", (Told,), {"capture": CaptureSpec({"post_block": [1], "heads": [1]})})
    expected = r"^controllers.told@x.capture: got heads:1, expected a site of the residual stream"
    with pytest.raises(UsageError, match=expected):
        ConfiguredController("told@x", reader, NoConfig()).check(MODEL)


def test_the_hub_says_what_its_controllers_cannot_do(address):
    trouble = ["controller told: it steers at: got post_block:2"]
    with running_hub(address) as hub:
        hello = make_hello()
        with worker_link(address, hello, staged=lambda: Staged(troubles=tuple(trouble))):
            problem = f"engine {hello.engine}: {trouble[0]}"
            eventually(lambda: problems(hub, 0.0) == [problem])
            assert hub.status()["problems"] == [problem]
            trouble.clear()
            eventually(lambda: problems(hub, 0.0) == [])


@pytest.fixture
def locked(monkeypatch):
    """Whether each buffer that is asked for is to be page-locked; here none can be."""
    asked, empty = [], torch.empty

    def unlocked(*size, pin_memory=False, **kwargs):
        asked.append(pin_memory)
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", unlocked)
    return asked


@pytest.fixture
def capture(started, locked):
    """A worker's capflow as far as planning a step needs it, on a device whose staging memory has three rows."""
    pytest.importorskip("vllm")
    from capflow_engine.stepclock import StepClock
    from capflow_engine.taps.widths import Widths
    from capflow_engine.worker.lineup import Lineup
    from capflow_engine.worker.rows import RowMemory
    from capflow_engine.worker.worker import WorkerCapture

    capture = object.__new__(WorkerCapture)
    capture.planner, capture.requests, capture._ranks, capture.sends = Planner(4), {}, 1, True
    capture.memory = RowMemory(Widths.uniform(8, 4), torch.float32, 1)
    staging = np.empty((3, 8))
    capture.tables = SimpleNamespace(resident=True, staging=staging, holds=lambda plan: plan.rows <= len(staging))
    capture.controllers = [started(step=[STEER])[0]]
    capture._events, capture.checksums = SimpleNamespace(number=1), SimpleNamespace(fold=lambda *_: None)
    capture.agreement = SimpleNamespace(stepped=lambda _: None)
    capture._lineup, capture.clock = Lineup(capture.requests), StepClock()
    capture.info, capture.deciding = MODEL, Deciding(capture.requests, capture.controllers, MODEL, 1)
    seen, nothing = capture.planner.program({1: Positions.ALL}), capture.planner.nothing
    for key, view in (("seen", seen), ("unseen", nothing)):
        capture.requests[key] = Tracked(key, key, 9, nothing, view)
    return capture


def batch(start, length):
    """A runner's batch: positions `start .. start + length` of a request that a controller sees."""
    from capflow_engine.compat.step import RunnerBatch

    return RunnerBatch(["seen"], np.array([start]), np.array([length]))


@pytest.mark.engine
def test_a_step_with_more_rows_for_controllers_than_the_device_has_memory_for_writes_none_and_is_told(capture):
    capture.prepare(batch(0, 3))
    assert (capture._plan.rows, len(capture._buffer)) == (3, 96)
    assert capture.controllers[0].troubles == ()
    capture.prepare(batch(3, 4))
    assert (capture._plan.rows, capture._plan.blocks) == (0, ())
    (trouble,) = capture.controllers[0].troubles
    assert "missed steps: 1; the last: staging memory: got 4 rows of a step, expected at most 3" in trouble


@pytest.mark.engine
@pytest.mark.parametrize(("request_id", "done"), [("seen", 1), ("unseen", 0)])
def test_a_controller_steers_no_request_that_it_cannot_see(capture, request_id, done):
    """Its cache blocks are anybody's: it came before the controller did."""
    capture.controllers[0]._all[0].controller.step = [Steer(request_id, (TWO,))]
    capture.deciding.keep(1, capture.planner.plan([]), None, 0, [Scored((), None)], lambda: None)
    assert [each.key for each in capture.deciding.begin({}, {})] == ["seen"] * done
    assert bool(capture.controllers[0].troubles) != bool(done)


@pytest.mark.engine
def test_rows_for_controllers_alone_come_to_memory_that_a_copy_does_not_wait_for(capture, locked):
    capture.prepare(batch(0, 3))
    assert locked == [True]
    assert len(capture._buffer) == 3 * 8 * 4


def test_an_ordered_controller_runs_at_the_last_stage_and_steers_at_any(started):
    first, _ = started(layers=range(2), last=False, mode="ordered", capture=CaptureSpec({"post_block": [2]}))
    assert (first.here, first.ordered, first.troubles, first.watching("r")) == (False, False, (), ())
    assert first.owner(0) == Owner(0, "told")
    last, kind = started(
        layers=range(2, 4), mode="ordered", capture=CaptureSpec({"post_block": [2]}), step=[Steer("r", (ONE,))]
    )
    assert (last.here, last.ordered, last.troubles) == (False, True, ())
    assert run(last) == []
    assert run(last, ordered=True) == [Steer("r", (ONE,))]
    kind.step = [Abort("r", as_="stop")]
    assert run(last, ordered=True) == [Abort("r", as_="stop")]


def test_an_abort_ends_a_request_at_a_row_of_its_step_or_at_its_latest(started):
    """Tokens of earlier steps are with their readers."""
    controllers, kind = started(mode="ordered", capture=CaptureSpec({"post_block": [2]}))
    plan = Planner(4).nothing
    shown = step((Tracked("key", "r", 4, plan, plan), 5, 3))
    kind.step = [Decision("r", Abort("r"), position=2)]
    (decided,) = controllers.run(shown, {"r": "key"}, ordered=True)
    assert (decided.position, decided.row) == (5, 7)
    (decided,) = controllers.run(step(), {"r": "key"}, ordered=True)
    assert decided.row == -1
    decisions = Decisions(lambda request, first: None)
    output = SimpleNamespace(capflow_decisions=StepAnswer([decided]).encode())
    request = SimpleNamespace(request_id="key", num_tokens=9, num_prompt_tokens=4)
    decisions.read(output, {"key": request})
    assert decisions.end("key").row + 1 == 8  # what its nine tokens needed


def test_an_ordered_controller_that_reads_at_an_earlier_stage_is_refused_by_name(started):
    controllers, _ = started(layers=range(2, 4), mode="ordered", step=[STEER])
    assert not controllers.ordered
    expected = "mode ordered reads: got post_block:1, expected sites of the last pipeline stage, with layers 2..3; read"
    assert expected in controllers.troubles[0]


def test_an_ordered_controller_forgets_a_request_when_it_has_seen_its_last_step(started):
    done = []
    controllers, kind = started(mode="ordered", step=[STEER])
    kind.on_request_done = lambda self, request: done.append(request)
    controllers.forget("r", "key", 3)
    run(controllers, step(number=2), ordered=True)
    assert done == []
    run(controllers, step(number=3), ordered=True)
    assert done == ["r"]


def test_a_slow_controller_is_warned_of_and_disabled_if_it_stays_so(started, monkeypatch, caplog):
    monkeypatch.setattr(limits, "CONTROLLER_CALL_S_MAX", 0.0)
    caplog.set_level(logging.WARNING, logger="vllm.capflow.control")
    controllers, _ = started(step=[STEER])
    for _ in range(limits.CONTROLLER_CALLS_TIMED):
        assert controllers.troubles == ()
        assert run(controllers) == [STEER]
    assert "controller told: slow: " in controllers.troubles[0]
    for _ in range(limits.CONTROLLER_CALLS_TIMED):
        run(controllers)
    assert "controller told: disabled: too slow: " in controllers.troubles[0]
    assert run(controllers) == []
    assert len(caplog.records) == 2
    counts = controllers.counts["told"]
    assert counts.calls == 2 * limits.CONTROLLER_CALLS_TIMED
    assert counts.seconds > 0


def test_a_controller_that_is_slow_once_is_no_trouble(started, monkeypatch):
    monkeypatch.setattr(limits, "CONTROLLER_CALL_S_MAX", 0.0)
    controllers, _ = started(step=[STEER])
    for _ in range(limits.CONTROLLER_CALLS_TIMED):
        run(controllers)
    monkeypatch.setattr(limits, "CONTROLLER_CALL_S_MAX", 10.0)
    for _ in range(limits.CONTROLLER_CALLS_TIMED):
        run(controllers)
    assert controllers.troubles == ()


def test_a_controller_that_takes_very_long_is_disabled_after_that_call(started, monkeypatch):
    monkeypatch.setattr(limits, "CONTROLLER_S_MAX", 0.0)
    controllers, _ = started(step=[STEER])
    assert run(controllers) == [STEER]
    assert "controller told: disabled: too slow: " in controllers.troubles[0]
    assert "in 1 steps, at most 0 s are allowed" in controllers.troubles[0]
    assert run(controllers) == []


WRONG_PROBES = {
    "no probe": (object(), "probes()[0]: got object, expected a StepProbe"),
    "NaN": (StepProbe(SITES[1], [np.nan] * 8), "finite numbers"),
    "no vector": (StepProbe(SITES[1], np.ones((2, 4))), "shape (2, 4)"),
    "another width": (StepProbe(SITES[1], np.ones(4)), "got 4 numbers, expected 8, the model's width"),
    "another score": (StepProbe(SITES[1], np.ones(8), score="l2"), "got l2, expected one of dot, cosine, cast"),
    "no positions": (StepProbe(SITES[1], np.ones(8), positions="some"), "positions"),
}


@pytest.mark.parametrize("case", WRONG_PROBES)
def test_a_probe_that_cannot_work_is_refused_where_the_engine_runs(started, case):
    probe, words = WRONG_PROBES[case]
    controllers, _ = started(step=[STEER], probes=lambda self: [probe])
    assert words in controllers.troubles[0]
    assert controllers.scorer is None


def scored(scorer, rows, width=None):
    """Return the scores of rows by each probe of a scorer, at site 0."""
    program = Planner(1).program({0: Positions.ALL})
    tracked = Tracked("key", "r", 1, Planner(1).nothing, program)
    plan = Planner(1).plan([Scheduled(tracked, 0, 0, len(rows))])
    parts, count = scorer.parts(plan)
    return scorer.score(parts, count, rows).reshape(-1, len(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 65, 4096, 70_000])
def test_scores_are_those_of_the_rows_and_independent_of_the_batch(dtype, width):
    rng = np.random.default_rng(width)
    weights = rng.normal(size=(3, width)).astype(np.float32)
    site = Site(0, "post_block")
    probes = [(0, StepProbe(site, w, 0.5, kind)) for w, kind in zip(weights, ("dot", "cosine", "cast"), strict=True)]
    scorer = ProbeScorer(probes, width, torch.device("cpu"), 0)
    rows = torch.from_numpy(rng.normal(size=(37, width)).astype(np.float32)).to(dtype)
    got = scored(scorer, rows)
    x = rows.double().numpy()
    w, norms = weights.astype(np.float64), np.linalg.norm(x, axis=1)
    dot = x @ w[0]
    cosine = x @ w[1] / norms / np.linalg.norm(w[1])
    along = np.tanh(np.outer(x @ w[2] / (w[2] @ w[2]), w[2]))
    cast = (x * along).sum(1) / norms / np.linalg.norm(along, axis=1)
    for mine, expected in zip(got, (dot, cosine, cast), strict=True):
        assert np.abs(mine - (expected + 0.5)).max() < 1e-5 * max(1.0, np.abs(expected).max())
    for begin in range(0, 37, 5):
        for length in (1, 2, 7):
            part = scored(scorer, rows[begin : begin + length].clone())
            assert np.array_equal(part, got[:, begin : begin + length])


def test_a_row_of_zeros_has_cosine_zero_and_nan_stays_nan():
    site = Site(0, "post_block")
    scorer = ProbeScorer(
        [(0, StepProbe(site, np.ones(8), 0.0, kind)) for kind in ("cosine", "cast")], 8, torch.device("cpu"), 0
    )
    rows = torch.zeros((2, 8))
    rows[1] = float("nan")
    got = scored(scorer, rows)
    assert got[:, 0].tolist() == [0.0, 0.0]
    assert np.isnan(got[:, 1]).all()


class Scoring(Told):
    """Keeps what it sees."""

    def spec(self):
        return self.capture

    def probes(self):
        return [StepProbe(SITES[1], np.arange(8), positions=self.positions)]

    def on_step(self, view):
        self.seen.append([(s.request, s.probe, s.start, s.scores.tolist()) for s in view.scores()])
        self.rows.append([(r.request, r.start, len(r.rows)) for r in view.rows()])
        return ()


def test_each_controller_sees_the_positions_and_requests_that_it_names(monkeypatch):
    """Two controllers score at one site, and their rows lie together."""
    kinds = {
        name: type(name, (Scoring,), {"name": name, "seen": [], "rows": [], "positions": positions, "capture": capture})
        for name, positions, capture in (
            ("every", "all", None),
            ("late", "all_generated", None),
            ("some", "all", CaptureSpec({"post_block": [1]}, "last_prompt")),
        )
    }
    monkeypatch.setattr(control, "load_plugins", lambda: kinds)
    specs = [
        ControllerSpec(
            name,
            msgspec.msgpack.encode(NoConfig()),
            "",
            kind.capture,
            (CaptureSpec({"post_block": [1]}, kind.positions),),
            requests="b*" if name == "some" else "*",
        )
        for name, kind in kinds.items()
    ]
    controllers = Controllers(specs, MODEL, SITES, 0)
    planner = Planner(4)

    def tracked(name):
        captures = controllers.captures(controllers.watching(name))
        wanted = Positions.NONE
        for capture in captures:
            wanted = wanted | capture.set_of_positions()
        return Tracked(name, name, 3, planner.nothing, planner.program({1: wanted}))

    batch = [Scheduled(tracked("a"), 0, 0, 5), Scheduled(tracked("b"), 5, 2, 2)]
    plan = planner.plan(batch)
    rows = torch.arange(plan.rows * 8, dtype=torch.float32).reshape(-1, 8) / 100
    parts, count = controllers.scorer.parts(plan)
    scores = controllers.scorer.score(parts, count, rows)
    shown = Shown(1, plan, rows.numpy(), {"a": 4}, parts, scores)
    assert controllers.run(shown, {"a": "a", "b": "b"}) == []
    expected = rows.numpy() @ np.arange(8)
    offset = {"a": 0, "b": 5}

    def part(name, start, length, first):
        return name, 0, start, pytest.approx(expected[offset[name] + first :][:length].tolist())

    assert kinds["every"].seen == [[part("a", 0, 4, 0), part("b", 2, 2, 0)]]
    assert kinds["late"].seen == [[part("a", 3, 1, 3), part("b", 3, 1, 1)]]
    assert kinds["some"].seen == [[part("b", 2, 2, 0)]]
    assert [kinds[name].rows for name in kinds] == [[[]], [[]], [[("b", 2, 1)]]]
