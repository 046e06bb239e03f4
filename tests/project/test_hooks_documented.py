"""What a plugin fills in stands in docs/plugins.md, with the signature that it has, and is called."""

import importlib.metadata
import inspect
import re
import sys
import types

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.plugins import consumer as contract
from capflow.plugins.configure import configure, load_plugins
from capflow.plugins.consumer import ENTRY_POINT_GROUP, Consumer, Context, Controller, NoConfig, StepView, hookimpl
from capflow.steering.action import Abort, Steer
from capflow.steering.vector import SteeringVector
from capflow.testing import MemoryHub
from capflow.testing.conformance import Conformance
from capflow_engine.scheduler.orders import Decided
from capflow_engine.taps.plan import Planner
from capflow_engine.worker.control import controllers as control
from capflow_engine.worker.control.view import Shown
from tests.kit.frames import make_model
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def hooks():
    """Return the hooks of plugin modules, by name."""
    return {name: value for name, value in vars(contract).items() if hasattr(value, "capflow_spec")}


def methods(kind):
    """Return what a class has for others to fill in or call, by name."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and callable(inspect.unwrap(getattr(value, "__func__", value)))
        and not inspect.isclass(value)
    }


DOCUMENTED = [
    *(("", name, hook) for name, hook in hooks().items()),
    *(
        (kind.__name__, name, call)
        for kind in (Consumer, Context, Controller, StepView)
        for name, call in methods(kind).items()
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "call"), DOCUMENTED, ids=[f"{kind}.{name}".lstrip(".") for kind, name, _ in DOCUMENTED]
)
def test_every_hook_is_documented_with_its_signature(kind, name, call):
    section = PAGE if not kind else PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]
    signature = str(inspect.signature(getattr(call, "__func__", call))).replace("'", "")
    signature = re.sub(r"\((self|cls)(?:, )?", "(", signature)
    assert f"`{name}{signature}`" in section, f"docs/plugins.md: `{name}{signature}`"


def test_the_page_names_nothing_else():
    documented = set(re.findall(r"^\* `(\w+)\(", PAGE, re.MULTILINE))
    assert documented == {name for _, name, _ in DOCUMENTED}


def test_every_rule_of_the_conformance_suite_is_documented():
    rules = [name for name, _ in inspect.getmembers(Conformance, inspect.isfunction) if name.startswith("test_")]
    documented = re.findall(r"^\| `(test_\w+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert sorted(documented) == sorted((name, inspect.getdoc(getattr(Conformance, name))) for name in rules)


# What is documented is called.


def recording(kind, called, **gives):
    """Return a subclass that overrides every method and records the calls.

    gives: the results of methods; the others return what the class returns.
    """

    def filled_in(name, own):
        def method(_, *args):
            called[name] = args
            return gives.get(name)

        return classmethod(method) if isinstance(own, classmethod) else method

    everything = {name: filled_in(name, vars(kind)[name]) for name in methods(kind)}
    return type("Every", (kind,), {**everything, "name": "every", "Config": NoConfig, "State": NoConfig})


def test_every_hook_of_a_plugin_module_is_called(monkeypatch):
    called = []
    module = types.ModuleType("every_hook")
    for name in hooks():
        setattr(module, name, hookimpl(lambda name=name: called.append(name) or []))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert load_plugins([importlib.metadata.EntryPoint("every", module.__name__, ENTRY_POINT_GROUP)]) == {}
    assert called == list(hooks())


def test_every_method_of_a_consumer_is_called():
    called = {}
    every = recording(Consumer, called, spec=CaptureSpec({"post_block": [0]}))
    configured = configure("every", {}, {"every": every})
    with MemoryHub(configured) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        (context,) = called["open"]
        context.act(Abort("r1"))
        assert hub.lanes[0].status()["backlog"]["items"] == 0
        eventually(lambda: engine.actions() and "on_action" in called and "on_idle" in called)
        engine.finish("r1")
        assert hub.result("r1").status == "ok"
        engine.lose()
        eventually(lambda: "on_engine_gone" in called)
    for_commands = {"look"}  # the table at the end of `capflow run --model`
    assert set(called) == set(methods(Consumer)) - for_commands
    assert called["on_session"] == ("engine-1", make_model())
    assert called["on_engine_gone"] == ("engine-1",)
    assert [chunk.request.id for chunk in called["on_frame"][0].chunks()] == ["r1"]
    assert called["on_request_done"][0].request == called["on_action"][0].request == "r1"


def test_every_method_of_a_controller_is_called(monkeypatch):
    called = {}
    steer = Steer("r1", (SteeringVector.make(Site(0, "post_block"), np.ones(8)),))
    spec = CaptureSpec({"post_block": [0]})
    gives = {"load": NoConfig(), "spec": spec, "probes": (), "steers": (), "on_step": [steer]}
    plugins = {"every": recording(Controller, called, **gives)}
    monkeypatch.setattr(control, "load_plugins", lambda: plugins)
    model = make_model()
    running = control.Controllers([configure("every", {}, plugins).spec()], model, model.sites, 0)
    assert running.captures(running.watching("r1")) == [spec]
    decided = running.run(Shown(7, Planner(1).plan([]), None, {}), {"r1": "key"})
    assert decided == [Decided("key", 0, 0, steer)]
    running.forget("r1", "key", 8)
    assert set(called) == set(methods(Controller))
    assert called["open"] == (model,)
    assert called["on_step"][0].step == 7
    assert called["on_request_done"] == ("r1",)
