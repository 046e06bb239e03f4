"""Several instances of one plugin in a hub: each has a name, options, a queue, an inbox and results of its own."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from rich.console import Console

import capflow
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.view import view
from capflow.errors import UsageError
from capflow.hub.monitor.metrics import registry_of
from capflow.plugins.configure import ConfiguredConsumer, configure, configure_all, load_plugins
from capflow.plugins.consumer import Controller
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import Steer
from capflow.steering.vector import SteeringVector
from capflow.testing import MemoryHub
from capflow_engine.taps.plan import Planner
from capflow_engine.worker.control import controllers as control
from capflow_engine.worker.control.view import Shown
from tests.kit.frames import make_model

KNOWN = load_plugins()


def consumers_of(*texts):
    return configure_all(texts, None, KNOWN)[0]


def test_an_instance_has_a_name_options_and_an_inbox_of_its_own(tmp_path):
    hot, cold = consumers_of(
        f"filesystem:root={tmp_path}/hot", f"filesystem@cold:root={tmp_path}/cold,positions=last_prompt"
    )
    assert (hot.name, cold.name) == ("filesystem", "filesystem@cold")
    assert (hot.consumer.spec().positions, cold.consumer.spec().positions) == ("all", "last_prompt")
    assert hot.spill.name.startswith("filesystem-")
    assert cold.spill.name.startswith("filesystem@cold-")


def test_a_file_names_instances_as_the_command_line_does(tmp_path):
    path = tmp_path / "hub.toml"
    path.write_text('[[consumer]]\nname = "log"\n[[consumer]]\nname = "log@rare"\nevery = 10\n')
    plain, rare = configure_all([], path, KNOWN)[0]
    assert [(one.name, one.consumer.config.every) for one in (plain, rare)] == [("log", 1), ("log@rare", 10)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["log", "log"], "consumers.log: got the consumer twice, expected it once; name the other one log@NAME, with"),
        (["log@a", "log@a"], "consumers.log@a: got the consumer twice, expected it once; name the other one log@NAME"),
        (["log@"], "--consumer: got log@, expected log@ and 1..64 letters, digits, - and _"),
        (["log@a b"], "--consumer: got log@a b, expected log@ and 1..64"),
        (["log@../x"], "--consumer: got log@../x, expected log@ and 1..64"),
        (["nolog@a"], "--consumer: got nolog, expected one of "),
        (["log@a:every=0"], "consumers.log@a.every: got 0, expected 1 or more"),
        (["log@a:evry=0"], "consumers.log@a.evry: got an unknown option"),
        (["dashboard@a:host=0.0.0.0"], "consumers.dashboard@a.host: got 0.0.0.0"),
    ],
)
def test_what_cannot_be_an_instance_is_refused_by_its_name(texts, message):
    with pytest.raises(UsageError) as error:
        configure_all(texts, None, KNOWN)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("filesystem:root={0}/a", "filesystem@b:root={0}/b/../a"),
        ("filesystem@a:root={0}/a,layout=sharded", "filesystem@b:root={0}/link"),
        ("duckdb:path={0}/a.db", "duckdb@b:path={0}/./a.db"),
        ("record:path={0}/a", "record@b:path={0}/a"),
        ("nats:stream=s", "nats@b:stream=s"),
        ("dashboard:port=18765", "dashboard@b:port=18765"),
    ],
)
def test_two_instances_that_would_write_to_one_place_are_refused(tmp_path, one, other):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match=r"^consumers\.\w+@b\.\w+: got .*, expected another than that of \w+"):
        configure_all([one.format(tmp_path), other.format(tmp_path)], None, KNOWN)


def test_each_instance_has_the_rows_and_results_that_are_its_own(tmp_path):
    hot, cold = consumers_of(
        f"filesystem:root={tmp_path}/hot", f"filesystem@cold:root={tmp_path}/cold,positions=last_prompt"
    )
    with MemoryHub(hot, cold) as hub:
        assert all(lane.durable for lane in hub.lanes)
        assert len({lane.inbox.directory for lane in hub.lanes}) == 2
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4)])
        engine.step([("r1", 4, 4, 1)])
        engine.finish("r1")
        results = hub.results("r1")
        assert {name: result.status for name, result in results.items()} == {
            "filesystem": "ok",
            "filesystem@cold": "ok",
        }
        status = hub.hub.status()
        assert list(status["consumers"]) == ["filesystem", "filesystem@cold"]
        metrics = registry_of(hub.hub)
        count = len([site for site in make_model().sites if site.hook == "post_block"])
        for name, rows in (("filesystem", 5 * count), ("filesystem@cold", count)):
            assert metrics.get_sample_value("capflow_consumer_rows_total", {"consumer": name}) == rows
        shown = Console(width=80, file=io.StringIO(), color_system=None)
        shown.print(view(status, None))
        assert "filesystem@cold" in shown.file.getvalue()
    for root, count in (("hot", 5), ("cold", 1)):
        capture = capflow.open(tmp_path / root)["r1"]
        assert {len(capture[site].rows) for site in capture.sites} == {count}


def test_long_names_of_instances_are_told_apart(tmp_path):
    log = [
        ConfiguredConsumer.of(one.consumer)
        for one in consumers_of("log@experiment-number-1", "log@experiment-number-2")
    ]
    with MemoryHub(*log) as hub:
        status = {
            f"filesystem@experiment-{n}": hub.hub.status()["consumers"]["log@experiment-number-1"] for n in (1, 2)
        }
        for width, kind in ((32, "files…"), (80, "filesystem")):
            shown = Console(width=width, file=io.StringIO(), color_system=None)
            shown.print(view({**hub.hub.status(), "consumers": status}, None))
            assert all(f"{kind}@experiment-{n} " in shown.file.getvalue() for n in (1, 2))


class Steady(Controller):
    """Asks for what its option says, at each step."""

    name = "steady"

    class Config(msgspec.Struct, frozen=True):
        layer: int = 0

    State = Config

    @classmethod
    def load(cls, config):
        if config.layer < 0:
            raise UsageError("consumers.steady.layer: got less than 0")
        return config

    def spec(self):
        return CaptureSpec({"post_block": [self.state.layer]})

    def on_step(self, view):
        return [Steer(f"r{self.state.layer}", (SteeringVector.make(Site(0, "post_block"), np.ones(8)),))]


def test_a_worker_runs_every_instance_of_a_controller_by_its_name(monkeypatch):
    entry = {"steady": Steady}
    _, (plain, named) = configure_all(["steady:layer=1", "steady@second:layer=2"], None, entry)
    specs = [msgspec.msgpack.decode(msgspec.msgpack.encode(one.spec()), type=ControllerSpec) for one in (plain, named)]
    assert [(spec.name, spec.label) for spec in specs] == [("steady", "steady"), ("steady", "steady@second")]
    monkeypatch.setattr(control, "load_plugins", lambda: entry)
    model = make_model()
    running = control.Controllers(specs, model, model.sites, 0)
    keys = {"r1": "r1", "r2": "r2"}
    decided = running.run(Shown(1, Planner(1).plan([]), None, {}), keys)
    result = [(running.owner(each.order).name, each.action.request) for each in decided]
    assert result == [("steady", "r1"), ("steady@second", "r2")]


def test_an_option_of_a_controller_is_named_by_its_instance():
    with pytest.raises(UsageError, match=r"^consumers\.steady@second\.layer: got less than 0$"):
        configure("steady@second", {"layer": -1}, {"steady": Steady})


def test_a_hub_that_knows_no_instances_sends_what_every_worker_reads():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ControllerSpec("gate", b"x"))) == {
        "name": "gate",
        "state": b"x",
    }
