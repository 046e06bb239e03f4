"""Plugins: found through entry points, and refused by name when they cannot be used."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import types
from typing import Literal

import msgspec
import pytest
from click.testing import CliRunner

import capflow
from capflow import extras, limits
from capflow.buffers.policy import FALLBACKS, POLICIES_OF_WORKERS, WhenFull
from capflow.buffers.spool import default_root
from capflow.capture.spec import CaptureSpec
from capflow.cli import cli
from capflow.cli.engine.run import run
from capflow.errors import CapflowError, UsageError
from capflow.plugins.configure import (
    ConfiguredConsumer,
    ConfiguredController,
    configure,
    configure_all,
    load_plugins,
    options_of,
    parse,
    read_config,
)
from capflow.plugins.consumer import Consumer, Controller
from tests.kit.sources import modules


class Sink(Consumer):
    """Takes everything."""

    name = "sink"
    policy = "drop"

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        root: str
        count: int = 3
        ratio: float = 0.5
        on: bool = False
        layers: list[int] | str = "all"
        names: tuple[str, ...] = ()
        mode: Literal["a", "b"] = "a"
        limit: int | None = None

    def check(self):
        if self.config.root == "nowhere":
            raise UsageError("consumers.sink.root: got nowhere")
        if self.config.root == "bug":
            raise KeyError("bug")

    def on_frame(self, frame):
        pass


class Watch(Controller):
    name = "watch"

    class Config(msgspec.Struct, frozen=True):
        threshold: float

    class State(msgspec.Struct, frozen=True):
        threshold: float

    @classmethod
    def load(cls, config):
        return cls.State(config.threshold)

    def spec(self):
        return CaptureSpec({"post_block": "all"})

    def on_step(self, view):
        return []


KNOWN = {"sink": Sink, "watch": Watch}


@pytest.fixture
def plugin(monkeypatch):
    """Make an entry point whose module gives what the test says."""

    def make(name, *, hook=None, classes=None, source=""):
        module = types.ModuleType(f"plugin_{name}")
        exec(source, module.__dict__)  # noqa: S102  the test's own text
        if hook is not None or classes is not None:

            @capflow.hookimpl
            def capflow_consumers():
                return classes

            setattr(module, hook or "capflow_consumers", capflow_consumers)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return importlib.metadata.EntryPoint(name, module.__name__, "capflow")

    return make


class TestLoading:
    def test_gives_every_plugins_classes_by_name(self, plugin):
        assert load_plugins([plugin("one", classes=[Sink]), plugin("two", classes=(Watch,))]) == KNOWN

    def test_includes_what_is_installed(self):
        plugins = load_plugins()
        assert {"filesystem", "duckdb", "log"} <= set(plugins)

    def test_a_plugin_that_cannot_be_imported_is_named(self):
        broken = importlib.metadata.EntryPoint("broken", "no.such.module", "capflow")
        with pytest.raises(
            CapflowError, match=r"plugin broken \(no\.such\.module\) cannot be loaded: got ModuleNotFoundError"
        ):
            load_plugins([broken])

    def test_one_name_twice_is_refused_naming_both(self, plugin):
        with pytest.raises(CapflowError, match="got sink from both one and two"):
            load_plugins([plugin("one", classes=[Sink]), plugin("two", classes=[Sink])])

    def test_a_module_without_hooks_is_refused(self, plugin):
        with pytest.raises(CapflowError, match=r"plugin empty .* expected an implementation of capflow_consumers"):
            load_plugins([plugin("empty")])

    def test_a_hook_that_does_not_exist_is_refused(self, plugin):
        with pytest.raises(CapflowError, match=r"plugin typo .* cannot be loaded: got PluginValidationError"):
            load_plugins([plugin("typo", hook="capflow_consumer", classes=[Sink])])

    @pytest.mark.parametrize(
        ("classes", "message"),
        [
            ([object], "expected subclasses of Consumer or Controller"),
            ([Sink(Sink.Config("x"))], "expected subclasses of Consumer or Controller"),
            ("sink", "expected a list of classes"),
            ([type("Nameless", (Sink,), {"name": None})], "Nameless.name: got nothing|Nameless.name"),
            ([type("Spaced", (Sink,), {"name": "a b"})], "Spaced.name: got a b, expected letters"),
            (
                [type("Abstract", (Consumer,), {"name": "x"})],
                "Abstract: got an abstract class, expected methods on_frame",
            ),
            ([type("Bad", (Sink,), {"Config": dict})], "Bad.Config: .*expected a msgspec.Struct"),
            ([type("Bad", (Sink,), {"extra": "duck"})], "Bad.extra: got duck, expected one of dashboard, .*, vllm"),
            ([type("Bad", (Sink,), {"extra": ["duckdb"]})], r"Bad.extra: got \['duckdb'\], expected one of"),
        ],
    )
    def test_what_is_no_consumer_is_refused_naming_the_plugin(self, plugin, classes, message):
        with pytest.raises(CapflowError, match=f"plugin bad.*(?:{message})"):
            load_plugins([plugin("bad", classes=classes)])


@pytest.mark.parametrize(
    "name", ["client", "request", "global", "hub", "client 1a2b", "module glad", "controller gate"]
)
def test_the_name_of_another_owner_of_actions_is_refused(name):
    named = Sink(Sink.Config("x"))
    named.instance = name
    message = f"got {name}, expected another name than client, request, global, hub, which own actions"
    with pytest.raises(UsageError, match=f"^--consumer: {message}$"):
        configure(name, {}, KNOWN)
    with pytest.raises(UsageError, match=f"^consumers: {message}$"):
        ConfiguredConsumer.of(named)


def test_a_plugin_of_the_name_of_another_owner_is_refused(plugin):
    taken = type("Taken", (Sink,), {"name": "global"})
    with pytest.raises(UsageError, match=r"plugin bad: .*Taken\.name: got global, expected another name than client"):
        load_plugins([plugin("bad", classes=[taken])])


class TestParse:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("log", ("log", {})),
            ("log:", ("log", {})),
            ("fs:root=/data", ("fs", {"root": "/data"})),
            ("fs:root=/data,count=3", ("fs", {"root": "/data", "count": "3"})),
            ("fs:root=a=b", ("fs", {"root": "a=b"})),
            (r"fs:root=a\,b,count=3", ("fs", {"root": "a,b", "count": "3"})),
            (r"fs:root=a\\,count=3", ("fs", {"root": "a\\", "count": "3"})),
            (r"fs:root=C:\new", ("fs", {"root": r"C:\new"})),
            ("fs:root=", ("fs", {"root": ""})),
            ("fs:root=a:b", ("fs", {"root": "a:b"})),
            ("fs: root=a, count=3", ("fs", {"root": "a", "count": "3"})),
        ],
    )
    def test_reads_names_and_options(self, text, expected):
        assert parse(text) == expected

    @pytest.mark.parametrize(
        "text", ["fs:root", "fs:=x", "fs:root=a,,count=1", "fs:root=a,", "fs:root=a,root=b", "fs:,"]
    )
    def test_refuses_what_is_not_an_option(self, text):
        with pytest.raises(UsageError, match=r"consumers.fs"):
            parse(text)


class TestConfigure:
    def test_converts_text_to_the_types_of_the_config(self):
        options = {
            "root": "/x",
            "count": "7",
            "ratio": "0.25",
            "on": "true",
            "layers": "1+2+5",
            "names": "a+b",
            "mode": "b",
            "limit": "9",
        }
        made = configure("sink", options, KNOWN)
        assert isinstance(made, ConfiguredConsumer)
        assert made.consumer.config == Sink.Config("/x", 7, 0.25, True, [1, 2, 5], ("a", "b"), "b", 9)
        assert (made.policy, made.queue_bytes_max) == (WhenFull.DROP, limits.QUEUE_BYTES_DEFAULT)

    @pytest.mark.parametrize(("layers", "expected"), [("all", "all"), ("3", "3"), ("3+4", [3, 4])])
    def test_a_list_or_a_word(self, layers, expected):
        assert configure("sink", {"root": "/x", "layers": layers}, KNOWN).consumer.config.layers == expected

    def test_takes_the_options_that_every_consumer_has(self):
        made = configure("sink", {"root": "/x", "policy": "block", "queue_bytes_max": "1000"}, KNOWN)
        assert (made.policy, made.queue_bytes_max) == (WhenFull.BLOCK, 1000)

    def test_spills_to_the_same_place_whenever_it_is_configured_alike(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        options = {
            "root": "x",
            "policy": "spill",
            "spool_dir": "spool",
            "spool_bytes": "5000",
            "spill_fallback": "drop",
        }
        spill = configure("sink", options, KNOWN).spill
        assert (spill.root, spill.bytes_max, spill.fallback) == (tmp_path / "spool", 5000, WhenFull.DROP)
        assert configure("sink", {**options, "spool_bytes": "9000"}, KNOWN).spill.name == spill.name
        assert configure("sink", {**options, "count": "4"}, KNOWN).spill.name != spill.name
        monkeypatch.chdir("/")  # where another `x` lies
        assert configure("sink", options, KNOWN).spill.name != spill.name

    def test_asks_a_consumer_for_its_spec_once(self):
        answers = [CaptureSpec({"post_block": "all"})]

        class Asked(Sink):
            def spec(self):
                return answers.pop()

        made = configure("sink", {"root": "x"}, {"sink": Asked})
        assert answers == []
        assert made.spec == made.spec == CaptureSpec({"post_block": "all"})

    def test_refuses_a_spec_that_is_none(self):
        class Wrong(Sink):
            def spec(self):
                return {"hooks": {"post_block": "all"}}

        with pytest.raises(CapflowError, match=r"consumer sink: spec\(\): got dict, expected a CaptureSpec or None"):
            configure("sink", {"root": "x"}, {"sink": Wrong})

    def test_makes_a_controllers_state(self):
        made = configure("watch", {"threshold": "0.5"}, KNOWN)
        assert isinstance(made, ConfiguredController)
        assert made.state == Watch.State(0.5)
        assert made.spec().name == "watch"

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("nope", {}, "--consumer: got nope, expected one of sink, watch; see `capflow plugins`"),
            ("sink", {}, "consumers.sink.root: got nothing, expected str, required"),
            (
                "sink",
                {"root": "x", "rot": "y"},
                (
                    "consumers.sink.rot: got an unknown option, "
                    "expected one of root, count, ratio, on, layers, names, mode"
                ),
            ),
            ("sink", {"root": "x", "count": "many"}, "consumers.sink.count: got many, expected int"),
            ("sink", {"root": "x", "on": "maybe"}, "consumers.sink.on: got maybe, expected bool"),
            ("sink", {"root": "x", "layers": "1+x"}, "consumers.sink.layers: got 1+x, expected int"),
            ("sink", {"root": "x", "mode": "c"}, "consumers.sink.mode: got c, expected a or b"),
            (
                "sink",
                {"root": "x", "policy": "no"},
                "consumers.sink.policy: got no, expected one of block, drop, skip, spill",
            ),
            (
                "sink",
                {"root": "x", "spool_bytes": "1"},
                "consumers.sink.spool_bytes: got policy drop, expected policy spill with it",
            ),
            (
                "sink",
                {"root": "x", "policy": "spill", "spool_bytes": "0"},
                (
                    f"consumers.sink.spool_bytes: got 0, expected 1..{limits.SPOOL_BYTES_MAX}; "
                    "remove it to use the default"
                ),
            ),
            (
                "sink",
                {"root": "x", "policy": "spill", "spill_fallback": "spill"},
                "consumers.sink.spill_fallback: got spill, expected one of block, drop",
            ),
            (
                "sink",
                {"root": "x", "policy": "spill", "spool_dir": "/dev/null/x"},
                "consumers.sink.spool_dir: got /dev/null, expected a directory that can be written",
            ),
            (
                "sink",
                {"root": "x", "queue_bytes_max": "-1"},
                (
                    f"consumers.sink.queue_bytes_max: got -1, expected 1..{limits.QUEUE_BYTES_MAX}; "
                    "remove it to use the default"
                ),
            ),
            ("sink", {"root": "x", "queue_bytes_max": "lots"}, "consumers.sink.queue_bytes_max: got lots"),
            ("sink", {"root": "x", "queue_bytes_max": True}, "consumers.sink.queue_bytes_max: got True"),
            ("sink", {"root": "nowhere"}, "consumers.sink.root: got nowhere"),
            ("watch", {"threshold": "1", "policy": "drop"}, "consumers.watch.policy: got an unknown option"),
        ],
    )
    def test_refuses_by_the_option(self, name, options, message):
        with pytest.raises(UsageError) as error:
            configure(name, options, KNOWN)
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("kind", [Sink, Watch])
    def test_a_missing_package_of_its_extra_is_named(self, monkeypatch, kind):
        plugin = type("Reader", (kind,), {"extra": "duckdb"})
        monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "duckdb" else object())
        with pytest.raises(UsageError) as error:
            configure(plugin.name, {}, {plugin.name: plugin})
        noun = "controller" if kind is Watch else "consumer"
        assert str(error.value) == (f"the {plugin.name} {noun}: missing package duckdb; pip install 'capflow[duckdb]'")

    def test_a_bug_in_a_plugin_is_laid_at_its_door(self):
        with pytest.raises(CapflowError, match="consumer sink failed: got KeyError"):
            configure("sink", {"root": "bug"}, KNOWN)

    def test_a_consumer_twice_is_refused(self):
        with pytest.raises(UsageError, match=r"consumers.sink: got the consumer twice"):
            configure_all(["sink:root=a", "sink:root=b"], None, KNOWN)


class TestConfigFile:
    def test_lists_consumers_with_options_of_any_type(self, tmp_path):
        path = tmp_path / "hub.toml"
        path.write_text(
            '[[consumer]]\nname = "sink"\nroot = "/x"\nlayers = [1, 2]\non = true\nqueue_bytes_max = 4096\n'
            '[[consumer]]\nname = "watch"\nthreshold = 1\n'
        )
        consumers, controllers = configure_all([], path, KNOWN)
        assert consumers[0].consumer.config == Sink.Config("/x", on=True, layers=[1, 2])
        assert consumers[0].queue_bytes_max == 4096
        assert controllers[0].state == Watch.State(1.0)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[[consumer]\n", "expected a TOML file"),
            ("x = 1\n", "got x, expected tables [[consumer]] and nothing else"),
            ("[consumer]\nname = 'a'\n", "expected tables [[consumer]] and nothing else"),
            ("[[consumer]]\nroot = 'a'\n", "consumer 1: name: expected a consumer's name"),
            ("consumer = [1]\n", "consumer 1: name"),
            (f"x = {'[' * 3000}{']' * 3000}\n", "expected a TOML file"),
            (f"x = 1{'0' * 5000}\n", "expected a TOML file"),
        ],
    )
    def test_refuses_what_is_none(self, tmp_path, content, message):
        path = tmp_path / "hub.toml"
        path.write_text(content)
        with pytest.raises(UsageError) as error:
            read_config(path)
        assert message in str(error.value)

    def test_names_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(UsageError, match="No such file"):
            read_config(tmp_path / "none.toml")


def test_options_are_told_with_types_and_defaults():
    options = {option.name: (option.type, option.required, option.default) for option in options_of(Sink)}
    assert options == {
        "root": ("str", True, None),
        "count": ("int", False, 3),
        "ratio": ("float", False, 0.5),
        "on": ("bool", False, False),
        "layers": ("list of int or str", False, "all"),
        "names": ("list of str", False, ()),
        "mode": ("a or b", False, "a"),
        "limit": ("int", False, None),
        "policy": ("block or drop or skip or spill", False, "drop"),
        "queue_bytes_max": ("int", False, limits.QUEUE_BYTES_DEFAULT),
        "spool_dir": ("str", False, str(default_root() / "hub")),
        "spool_bytes": ("int", False, limits.SPOOL_BYTES_DEFAULT),
        "spill_fallback": ("block or drop", False, "block"),
    }
    assert [option.name for option in options_of(Watch)] == ["threshold"]


def test_each_option_has_a_line_in_the_docstring():
    for name, plugin in load_plugins().items():
        assert (name, set(plugin.Config.__struct_fields__) - described(plugin.Config)) == (name, set())


def described(config):
    """Return the options that have a line in the docstring of a `Config`: `name: …`, or `name, other: …`."""
    lines = re.findall(r"^([a-z_, ]+): ", inspect.getdoc(config) or "", re.MULTILINE)
    return {field for line in lines for field in line.split(", ")}


def test_the_list_shows_descriptions_without_their_indentation():
    listed = CliRunner().invoke(cli, ["plugins"], env={"COLUMNS": "10000"})
    assert "max_rows 0 sets no bound" in listed.output


def test_the_defaults_of_policies_are_written_in_one_place():
    """Whoever has a default takes it from `capflow.buffers.policy`, which alone has the words."""
    names = {
        name for name, path in modules().items() if re.search(r'(?<!== )"block"', path.read_text(encoding="utf-8"))
    }
    # An experiment's table of answers has a column of this name.
    assert names - {"capflow_models.experiment.results.export"} == {"capflow.buffers.policy"}


def test_a_consumer_of_a_policy_that_there_is_not_is_refused():
    class Odd(Sink):
        policy = "bogus"

    with pytest.raises(UsageError, match="policy: got bogus, expected one of block, drop, skip, spill"):
        ConfiguredConsumer.of(Odd(None))


def test_the_command_line_offers_the_policies_that_there_are():
    offered = {option.name: option.type for option in run.params}
    assert tuple(offered["policy"].choices) == POLICIES_OF_WORKERS
    assert tuple(offered["spill_fallback"].choices) == FALLBACKS
