"""What a capture adds to a step: no eager step, no further compilation, and nothing that waits for the device."""

import ast
import inspect
import sys
import textwrap
from collections import Counter

import pytest
import torch

import capflow
from capflow.capture.positions import Positions
from capflow_engine.taps import bank, tables, tap
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import NONE, Steered
from capflow_engine.taps.gpu import kernel
from capflow_engine.taps.plan import Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker import changes, events, worker
from capflow_engine.worker.control import deciding
from capflow_engine.worker.gates import latches
from capflow_engine.worker.pending import EMPTY_PLAN
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, vector
from tests.kit.rows import ALL
from tests.kit.watching import watch

LENGTHS = (5, 1, 40, 3, 90, 17)


def generate(llm, *, capturing):
    steering = {"post_block": {1: vector(1)}}
    params = [
        capflow.sampling_params(
            capture=ALL if capturing else None,
            steering_vectors=steering if capturing and n % 2 else None,
            max_tokens=5,
            **GREEDY,
        )
        for n in range(len(LENGTHS))
    ]
    return llm.generate(prompts(LENGTHS, seed=int(capturing)), params, use_tqdm=False)


def eager_layers(llm, work):
    """Return how often a decoder layer's own Python ran while `work` did; compiled code runs none of it."""
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    code = type(model.model.layers[0]).forward.__code__
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_code is code

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def compilations():
    from torch._dynamo.utils import counters

    return {name: dict(counters[name]) for name in ("stats", "frames", "recompiles")}


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_capturing_step_runs_the_compiled_code_that_any_other_runs(tiny, keeper):
    with engine(tiny, hub=keeper.address) as llm:  # eager: what the counter counts
        steps = watch(llm)
        ran = eager_layers(llm, lambda: generate(llm, capturing=True))
        assert ran >= LAYERS * len(LENGTHS)
        assert ran % LAYERS == 0
        assert ran // LAYERS <= steps["steps"]
    rows = len(keeper.rows)
    assert rows == len(LENGTHS)
    with engine(tiny, hub=keeper.address, enforce_eager=False) as llm:
        before = compilations()
        assert eager_layers(llm, lambda: generate(llm, capturing=False)) == 0
        assert len(keeper.rows) == rows
        assert eager_layers(llm, lambda: generate(llm, capturing=True)) == 0
        assert len(keeper.rows) == 2 * rows
        assert compilations() == before


def test_a_forward_pass_between_steps_finds_nothing_to_do():
    """Replicas of a mixture of experts run one while another has requests; the last step's rows may still be copied."""
    kept = tables.Tables(
        sites=3,
        tokens=8,
        rows=24,
        hidden=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        resident=True,
    )
    planner = Planner(3)
    request = Tracked("1", "name", 4, planner.program({0: Positions.ALL, 2: Positions.ALL}), planner.nothing)
    request.steered = [SlotRange(0, 4, Steered(0, NONE, {}))]
    kept.load(planner.plan([Scheduled(request, 0, 0, 4)]), 8)
    assert (kept.site_line >= 0).any()
    assert (kept.token_steer >= 0).any()
    kept.load(EMPTY_PLAN, 0)
    assert (kept.site_line == -1).all()
    assert (kept.token_steer == -1).all()


WAITS = {"item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"}
"""What asks a tensor for its value; on a device each of these waits for it. (`numpy` fails there.)"""


class _Asking(torch.overrides.TorchFunctionMode):
    """Counts who asks a tensor for its value."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.asked[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.engine
def test_planning_a_step_asks_no_tensor_for_its_value(tiny, keeper):
    with engine(tiny, hub=keeper.address) as llm:
        capture = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.capflow
        asking, planned = _Asking(), []
        begin, prepare = capture.begin, capture.prepare

        def watched_begin(*args):
            with asking:
                begin(*args)

        def watched_prepare(*args):
            with asking:
                prepare(*args)
            planned.append(capture._planned.ship_rows)

        capture.begin, capture.prepare = watched_begin, watched_prepare
        generate(llm, capturing=True)
        assert sum(planned) > sum(LENGTHS)
        assert not asking.asked
        with asking:  # it does count
            int(torch.ones(1))
        assert asking.asked


def methods(cls, *left_out):
    return [(cls, name) for name in vars(cls) if inspect.isfunction(getattr(cls, name)) and name not in left_out]


ON_THE_STEP = [
    *methods(worker.WorkerCapture, "__init__", "close"),
    *methods(deciding.Deciding, "__init__", "begin", "_decide"),
    *methods(events.Events, "__init__"),
    *methods(changes.Changes, "__init__"),
    *methods(tables.Tables, "__init__"),
    *methods(bank.Bank, "__init__"),
    *methods(latches.Latches, "__init__"),
    *methods(tap.Tap, "__init__"),
    (kernel, "launch"),
    (tap, "_tap_gpu"),
]
"""The functions that run on the step's thread when the tables are on a device.

`Deciding.begin` is left out: it waits for the rows of the step before, which controllers are promised. So is `_decide`,
which runs when the output of its step is taken.
"""


def calls(source):
    """Return the names of the methods that are called, each with the keywords that every call of it has."""
    made = {}
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = {keyword.arg for keyword in node.keywords}
            made[node.func.attr] = made.get(node.func.attr, given) & given
    return made


@pytest.mark.parametrize(("owner", "name"), ON_THE_STEP)
def test_nothing_on_the_step_waits_for_the_device(owner, name):
    """Only handed on, to be called by the sender: the event's `synchronize`."""
    made = calls(inspect.getsource(getattr(owner, name)))
    assert made.keys().isdisjoint(WAITS | {"synchronize", "ready"})
    assert "non_blocking" in made.get("copy_", {"non_blocking"})


def test_the_reader_of_calls_sees_one_that_waits():
    source = """
    def f(self):
        if x:
            return self.a.item() + torch.cuda.synchronize()
        a.copy_(b, non_blocking=True)
        a.copy_(c)
    """
    assert calls(source) == {"item": set(), "synchronize": set(), "copy_": set()}
