"""Plugins: finds them, and makes configured consumers and controllers from the user's options.

Invariant: every installed plugin is loaded, or the start stops. A consumer that is silently missing would be noticed
only when its data is needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pluggy
import xxhash
from msgspec import inspect

from capflow import limits
from capflow.buffers.policy import FALLBACKS, POLICY_DEFAULT, WhenFull
from capflow.buffers.spool import check_root, default_root
from capflow.capture.model import ModelInfo
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import EXTRAS, require
from capflow.plugins import consumer as contract
from capflow.plugins.consumer import MODES, SCORES, Consumer, Controller, StepProbe
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import OWNER_PREFIXES, OWNERS
from capflow.steering.request import Steering
from capflow.text.suggestion import did_you_mean

Plugin = type[Consumer] | type[Controller]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Between the name of a plugin and that of an instance.
_AT = "@"
_FIELD = re.compile(r" - at `\$\.(\w+)")
_EXPECTED = re.compile(r"Expected (.*?)(?:, got .*?)?(?: - at .*)?$")
_SEQUENCES = (inspect.ListType, inspect.VarTupleType, inspect.TupleType, inspect.SetType, inspect.FrozenSetType)

UNIVERSAL_OPTIONS = ("policy", "queue_bytes_max", "spool_dir", "spool_bytes", "spill_fallback")
"""The options that every consumer has. The last three belong to the policy `spill`."""


@dataclass(frozen=True)
class Spill:
    """The inbox of a consumer with the policy `spill`.

    root: the directory of the inboxes.
    name: of the inbox's directory, or the beginning of it. The same configuration, run from the same directory, always
        has the same name.
    bytes_max: how much the inbox may hold.
    fallback: the policy if the inbox is full.
    """

    root: Path
    name: str
    bytes_max: int
    fallback: WhenFull

    @classmethod
    def of(cls, consumer: Consumer, root: Path | None, bytes_max: int | None, fallback: str | None) -> Spill:
        """Return the inbox of a consumer; None is the default."""
        options = msgspec.json.encode(consumer.config, enc_hook=str, order="sorted")
        digest = xxhash.xxh3_64_hexdigest(options + str(Path.cwd()).encode())
        return cls(
            (root or default_root() / "hub").absolute(),
            f"{consumer.instance}-{digest}",
            limits.SPOOL_BYTES_DEFAULT if bytes_max is None else bytes_max,
            WhenFull(fallback or POLICY_DEFAULT),
        )


@dataclass(frozen=True)
class ConfiguredConsumer:
    """A consumer ready to be opened, with the options of its queue in the hub.

    name: the instance's.
    spill: its inbox; None with another policy.
    """

    name: str
    consumer: Consumer
    policy: WhenFull
    queue_bytes_max: int = limits.QUEUE_BYTES_DEFAULT
    spill: Spill | None = None

    @classmethod
    def of(
        cls,
        consumer: Consumer,
        *,
        policy: str | None = None,
        queue_bytes_max: int | None = None,
        spool_dir: Path | None = None,
        spool_bytes: int | None = None,
        spill_fallback: str | None = None,
    ) -> ConfiguredConsumer:
        """Return the consumer with a queue. The defaults are its class's policy and the limits."""
        _check_owner("consumers", consumer.instance)
        chosen = policy or consumer.policy
        if chosen not in tuple(WhenFull):
            where, expected = f"consumers.{consumer.instance}.policy", f"one of {', '.join(WhenFull)}"
            raise UsageError(explain(where, got=chosen, expected=expected))
        overload = WhenFull(chosen)
        return cls(
            consumer.instance,
            consumer,
            overload,
            consumer.queue_bytes_max if queue_bytes_max is None else queue_bytes_max,
            Spill.of(consumer, spool_dir, spool_bytes, spill_fallback) if overload is WhenFull.SPILL else None,
        )

    @functools.cached_property
    def spec(self) -> CaptureSpec | None:
        """What the consumer captures of every request. The consumer is asked once, in the hub's process.

        Raises what the plugin raises, and CapflowError if it returns no spec.
        """
        spec = self.consumer.spec()
        if spec is not None and not isinstance(spec, CaptureSpec):
            got, expected = type(spec).__name__, "a CaptureSpec or None"
            raise CapflowError(explain(f"consumer {self.name}: spec()", got=got, expected=expected))
        return spec


@dataclass(frozen=True)
class ConfiguredController:
    """A controller ready to be sent to workers.

    name: the instance's.
    """

    name: str
    kind: type[Controller]
    state: msgspec.Struct

    def spec(self) -> ControllerSpec:
        """Return what a worker needs to run it."""
        return self._spec

    @property
    def captures(self) -> tuple[CaptureSpec, ...]:
        """What it reads and scores of every request."""
        return self._spec.captures

    @functools.cached_property
    def _spec(self) -> ControllerSpec:
        """Its spec; the plugin is asked once. Raises CapflowError if what it returns cannot work."""
        try:
            controller = self.make()
            capture, probes = controller.spec(), list(controller.probes())
            mode, requests, steering = controller.mode, controller.requests, controller.steering()
        except CapflowError:
            raise
        except Exception as e:
            raise CapflowError(explain(f"controller {self.name} failed", got=f"{type(e).__name__}: {e}")) from e
        if capture is not None and not isinstance(capture, CaptureSpec):
            got, expected = type(capture).__name__, "a CaptureSpec or None"
            raise CapflowError(explain(f"controller {self.name}: spec()", got=got, expected=expected))
        for number, probe in enumerate(probes):
            check_probe(probe, f"controller {self.name}: probes()[{number}]")
        if steering is not None and (not isinstance(steering, Steering) or steering.patches or steering.modules):
            got = "patches or modules" if isinstance(steering, Steering) else type(steering).__name__
            expected = "a Steering of vectors, clamps and gates, or None"
            raise CapflowError(explain(f"controller {self.name}: steering()", got=got, expected=expected))
        if capture is None and not probes and steering is None:
            expected = "a CaptureSpec of rows to read, probes, or steering"
            raise CapflowError(explain(f"controller {self.name}: spec() and probes()", got="none", expected=expected))
        if mode not in MODES:
            raise CapflowError(
                explain(f"controller {self.name}: mode", got=mode, expected=f"one of {', '.join(MODES)}")
            )
        if not isinstance(requests, str) or not requests:
            expected = "a pattern of ids, such as *"
            raise CapflowError(explain(f"controller {self.name}: requests", got=requests, expected=expected))
        return ControllerSpec(
            self.kind.name,
            msgspec.msgpack.encode(self.state),
            "" if self.name == self.kind.name else self.name,
            capture,
            tuple(probe.spec() for probe in probes),
            mode,
            requests,
            steering,
        )

    def check(self, model: ModelInfo) -> None:
        """Raise UsageError if the model does not have what the controller needs, or the plugin fails."""
        where = f"controllers.{self.name}.capture"
        for capture in self.captures:
            for site in capture.resolve(model.sites, num_layers=model.num_layers, where=where):
                site.check_stream(where)
        try:
            self.make().open(model)
        except UsageError:
            raise
        except Exception as e:
            raise UsageError(explain(f"controller {self.name} failed", got=f"{type(e).__name__}: {e}")) from e

    def make(self) -> Controller:
        """Return the controller, as a worker makes it."""
        controller = self.kind(self.state)
        controller.instance = self.name
        return controller


def check_probe(probe: Any, where: str) -> None:
    """Raise CapflowError if a controller's probe is none, or cannot work.

    where: the probe, for the message.
    """
    if not isinstance(probe, StepProbe):
        raise CapflowError(explain(where, got=type(probe).__name__, expected="a StepProbe"))
    probe.site.check_stream(f"{where}.site")
    weight = np.asarray(probe.weight)
    if weight.ndim != 1 or not np.isfinite(weight.astype(np.float64)).all() or not np.isfinite(probe.bias):
        expected = "hidden_size finite numbers, and a finite bias"
        raise CapflowError(
            explain(f"{where}.weight", got=f"shape {weight.shape}, bias {probe.bias}", expected=expected)
        )
    if probe.score not in SCORES:
        raise CapflowError(explain(f"{where}.score", got=probe.score, expected=f"one of {', '.join(SCORES)}"))
    probe.spec().set_of_positions(where)


Configured = ConfiguredConsumer | ConfiguredController


class Option(msgspec.Struct, frozen=True):
    """One option of a plugin for display.

    type: as a user reads it.
    default: its default, unless it is required.
    meaning: its line in the docstring of the plugin's `Config`.
    """

    name: str
    type: str
    required: bool
    default: Any = None
    meaning: str = ""


def load_plugins(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> dict[str, Plugin]:
    """Return the consumers and controllers of every installed plugin, by name.

    Raises CapflowError that names the plugin if it cannot be imported, brings another class, or repeats a name.
    """
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=contract.ENTRY_POINT_GROUP)
    plugins: dict[str, Plugin] = {}
    brought_by: dict[str, str] = {}
    for entry_point in sorted(entry_points, key=lambda e: e.name):
        for plugin in _brought(entry_point):
            _check(plugin, entry_point.name)
            if plugin.name in plugins:
                got = f"{plugin.name} from both {brought_by[plugin.name]} and {entry_point.name}"
                raise CapflowError(
                    explain("plugins", got=got, expected="names of their own", do="uninstall one of them")
                )
            plugins[plugin.name] = plugin
            brought_by[plugin.name] = entry_point.name
    return plugins


def _brought(entry_point: importlib.metadata.EntryPoint) -> list[Any]:
    """Return what one plugin's hook returns."""
    where = f"plugin {entry_point.name} ({entry_point.value})"
    manager = pluggy.PluginManager("capflow")
    manager.add_hookspecs(contract)
    try:
        manager.register(entry_point.load(), name=entry_point.name)
        manager.check_pending()
        brought = manager.hook.capflow_consumers()
    except Exception as e:
        got = f"{type(e).__name__}: {e}"
        raise CapflowError(explain(f"{where} cannot be loaded", got=got, do="mend it or uninstall it")) from e
    if not brought:
        raise CapflowError(explain(where, got="no hook", expected="an implementation of capflow_consumers()"))
    classes = brought[0]
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        raise CapflowError(explain(f"{where}: capflow_consumers()", got=classes, expected="a list of classes"))
    return list(classes)


def _check(plugin: Any, entry_point: str) -> None:
    where = f"plugin {entry_point}: capflow_consumers()"
    if not (isinstance(plugin, type) and issubclass(plugin, Consumer | Controller)):
        raise CapflowError(explain(where, got=plugin, expected="subclasses of Consumer or Controller"))
    name = getattr(plugin, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CapflowError(explain(f"{where}: {plugin.__name__}.name", got=name, expected="letters, digits, - and _"))
    _check_owner(f"{where}: {plugin.__name__}.name", name)
    if plugin.extra not in ("", *EXTRAS):
        expected = f"one of {', '.join(EXTRAS)}"
        raise CapflowError(explain(f"{where}: {plugin.__name__}.extra", got=plugin.extra, expected=expected))
    missing: Iterable[str] = getattr(plugin, "__abstractmethods__", ())
    if missing:
        expected = f"methods {', '.join(sorted(missing))}"
        raise CapflowError(explain(f"{where}: {plugin.__name__}", got="an abstract class", expected=expected))
    config = getattr(plugin, "Config", None)
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise CapflowError(explain(f"{where}: {plugin.__name__}.Config", got=config, expected="a msgspec.Struct"))


def _check_owner(where: str, name: str) -> None:
    """Raise UsageError for a name that is that of another owner of actions."""
    if name in OWNERS or name.startswith(OWNER_PREFIXES):
        expected = f"another name than {', '.join(OWNERS)}, which own actions"
        raise UsageError(explain(where, got=name, expected=expected))


def kind_of(plugin: Plugin) -> str:
    """Return `consumer` or `controller`."""
    return "consumer" if issubclass(plugin, Consumer) else "controller"


def options_of(plugin: Plugin) -> list[Option]:
    """Return a plugin's options, in the order of its Config, then those of every consumer."""
    meanings = _meanings(plugin.Config)
    options = [
        Option(
            field.name,
            _type_name(field.type),
            field.required,
            msgspec.to_builtins(_default(field), enc_hook=str),
            meanings.get(field.name, ""),
        )
        for field in _fields(plugin.Config)
    ]
    return [*options, *_universal_options(plugin)] if issubclass(plugin, Consumer) else options


def _universal_options(plugin: type[Consumer]) -> Iterable[Option]:
    """Yield the options of `UNIVERSAL_OPTIONS`."""
    rows: tuple[tuple[str, Any, str], ...] = (
        (" or ".join(WhenFull), plugin.policy, "what its queue does when it is full"),
        ("int", plugin.queue_bytes_max, "how many bytes its queue may hold in memory"),
        ("str", str(default_root() / "hub"), "with policy spill, the directory of its inbox"),
        ("int", limits.SPOOL_BYTES_DEFAULT, "with policy spill, how many bytes its inbox may hold"),
        (" or ".join(FALLBACKS), POLICY_DEFAULT, "with policy spill, the policy when its inbox is full"),
    )
    for name, (kind, default, meaning) in zip(UNIVERSAL_OPTIONS, rows, strict=True):
        yield Option(name, kind, required=False, default=default, meaning=meaning)


def _meanings(config: type[msgspec.Struct]) -> dict[str, str]:
    """Return the meaning of each option that has a line `NAME: …` or `NAME, NAME: …` in a docstring."""
    lines = re.findall(r"^([a-z0-9_, ]+): (.*(?:\n +.*)*)", getdoc(config) or "", re.MULTILINE)
    return {name: " ".join(meaning.split()) for names, meaning in lines for name in names.split(", ")}


def parse(text: str) -> tuple[str, dict[str, str]]:
    r"""Return the name and the options in `NAME:key=value,key=value` or `NAME@INSTANCE:key=value`.

    A value may contain `=`; a comma in it is written `\,`, a backslash before a comma `\\`.
    """
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in re.findall(r"(?:\\[\\,]|[^,])+|(?<=,)(?=,|$)", rest):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(explain(f"consumers.{name}", got=part, expected="key=value", do=r"write \, for a comma"))
        if key in options:
            raise UsageError(explain(f"consumers.{name}.{key}", got="the option twice", expected="it once"))
        options[key] = re.sub(r"\\([\\,])", r"\1", value)
    return name.strip(), options


def escaped(value: object) -> str:
    """Return the value of an option as `parse` reads it."""
    return str(value).replace("\\", "\\\\").replace(",", "\\,")


def read_config(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and options of the consumers in a TOML file, in tables `[[consumer]]`.

    A name may be `NAME@INSTANCE`.
    """
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as e:  # also for a number of 5,000 digits, and for deep nesting
        got = e.strerror if isinstance(e, OSError) else str(e)
        raise UsageError(explain(f"--config {path}", got=got, expected="a TOML file")) from e
    unknown = set(content) - {"consumer"}
    tables = content.get("consumer", [])
    if unknown or not isinstance(tables, list):
        got = min(unknown, default="consumer")
        raise UsageError(explain(f"--config {path}", got=got, expected="tables [[consumer]] and nothing else"))
    consumers = []
    for number, table in enumerate(tables, 1):
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str):
            raise UsageError(
                explain(f"--config {path}: consumer {number}: name", got=name, expected="a consumer's name")
            )
        consumers.append((name, {key: value for key, value in table.items() if key != "name"}))
    return consumers


def configure(name: str, options: Mapping[str, Any], plugins: Mapping[str, Plugin]) -> Configured:
    """Return the consumer or controller of a name with its options, checked.

    name: `NAME` or `NAME@INSTANCE`.
    plugins: the installed plugins, by name.
    Raises UsageError that names the option, what came and what was expected.
    """
    _check_owner("--consumer", name)
    kind, at, instance = name.partition(_AT)
    plugin = plugins.get(kind)
    if plugin is None:
        expected = f"one of {', '.join(sorted(plugins)) or 'none installed'}"
        name_only = re.split(r"[^\w-]", kind, maxsplit=1)[0]
        do = f"{did_you_mean(name_only, plugins)} see `capflow plugins`".lstrip()
        raise UsageError(explain("--consumer", got=kind, expected=expected, do=do))
    if at and not _NAME.fullmatch(instance):
        expected = f"{kind}@ and 1..64 letters, digits, - and _"
        raise UsageError(explain("--consumer", got=name, expected=expected))
    if plugin.extra:
        require(plugin.extra, f"the {kind} {kind_of(plugin)}")
    where = f"consumers.{name}"
    own = {
        key: value for key, value in options.items() if key not in UNIVERSAL_OPTIONS or not issubclass(plugin, Consumer)
    }
    config = _convert(plugin, own, where)
    try:
        if not issubclass(plugin, Consumer):
            controller = ConfiguredController(name, plugin, plugin.load(config))
            # Asked here, so that a plugin that fails stops the start.
            controller.spec()
            return controller
        consumer = plugin(config)
        consumer.instance = name
        consumer.check()
        configured = _with_queue(consumer, options, where)
        # Asked here, so that a wrong spec stops the start. The hub reads the answer.
        _ = configured.spec
    except CapflowError as e:
        rename(e, kind, name)
        raise
    except Exception as e:
        raise CapflowError(explain(f"consumer {name} failed", got=f"{type(e).__name__}: {e}")) from e
    return configured


def rename(error: CapflowError, name: str, instance: str) -> None:
    """Have an error about an option name the instance, if its message begins with the plugin's name alone."""
    option = str(error).removeprefix(f"consumers.{name}.")
    if option != str(error):
        error.args = (f"consumers.{instance}.{option}",)


def configure_all(
    texts: Iterable[str], config: Path | None, plugins: Mapping[str, Plugin]
) -> tuple[list[ConfiguredConsumer], list[ConfiguredController]]:
    """Return the consumers and controllers of a config file, then those of `--consumer` options.

    texts: the values of `--consumer`.
    config: the file.
    plugins: the installed plugins, by name.
    Raises UsageError for a name that comes twice, and for two instances of a consumer with the same claim.
    """
    asked: list[tuple[str, Mapping[str, Any]]] = list(read_config(config)) if config is not None else []
    asked.extend(parse(text) for text in texts)
    made: dict[str, Configured] = {}
    for name, options in asked:
        if name in made:
            do = f"name the other one {name.partition(_AT)[0]}@NAME, with a name of your own"
            raise UsageError(explain(f"consumers.{name}", got="the consumer twice", expected="it once", do=do))
        made[name] = configure(name, options, plugins)
    _check_claims(one.consumer for one in made.values() if isinstance(one, ConfiguredConsumer))
    return (
        [c for c in made.values() if isinstance(c, ConfiguredConsumer)],
        [c for c in made.values() if isinstance(c, ConfiguredController)],
    )


def _check_claims(consumers: Iterable[Consumer]) -> None:
    """Raise UsageError if two instances of one consumer would write to the same place."""
    claimed: dict[tuple[type[Consumer], tuple[str, str]], str] = {}
    for consumer in consumers:
        claim = consumer.claim()
        if claim is None:
            continue
        option, value = claim
        holder = claimed.setdefault((type(consumer), claim), consumer.instance)
        if holder != consumer.instance:
            expected = f"another than that of {holder}"
            raise UsageError(explain(f"consumers.{consumer.instance}.{option}", got=value, expected=expected))


def _fields(config: type[msgspec.Struct]) -> Sequence[inspect.Field]:
    info = inspect.type_info(config)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _default(field: inspect.Field) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None


def _convert(plugin: Plugin, options: Mapping[str, Any], where: str) -> msgspec.Struct:
    fields = {field.name: field for field in _fields(plugin.Config)}
    own = (*fields, *(UNIVERSAL_OPTIONS if issubclass(plugin, Consumer) else ()))
    for key in options:
        if key not in fields:
            do = f"{did_you_mean(key, own)} see `capflow plugins {plugin.name}`".lstrip()
            expected = f"one of {', '.join(own)}"
            raise UsageError(explain(f"{where}.{key}", got="an unknown option", expected=expected, do=do))
    for field in fields.values():
        if field.required and field.name not in options:
            expected = f"{_type_name(field.type)}, required"
            raise UsageError(explain(f"{where}.{field.name}", got="nothing", expected=expected))
    values = {key: _split(value, fields[key].type) for key, value in options.items()}
    try:
        return msgspec.convert(values, plugin.Config, strict=False)
    except msgspec.ValidationError as e:
        at = _FIELD.search(str(e))
        if at is None:
            raise UsageError(explain(where, got=str(e), expected="valid options")) from e
        text = _EXPECTED.match(str(e))
        expected = text[1].replace("`", "") if text else _type_name(fields[at[1]].type)
        raise UsageError(explain(f"{where}.{at[1]}", got=str(options[at[1]]), expected=expected)) from e


def _members(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _split(value: Any, kind: inspect.Type) -> Any:
    """Return the list that `a+b+c` means, if the option is a list."""
    members = _members(kind)
    if not isinstance(value, str) or not any(isinstance(member, _SEQUENCES) for member in members):
        return value
    if any(isinstance(member, inspect.StrType) for member in members) and "+" not in value:
        return value
    return value.split("+") if value else []


def _type_name(kind: inspect.Type) -> str:
    names = []
    for member in _members(kind):
        match member:
            case inspect.LiteralType():
                names.append(" or ".join(map(str, member.values)))
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
                items = _type_name(member.item_type)
                names.append(f"list of ({items})" if " or " in items else f"list of {items}")
            case inspect.NoneType():
                continue
            case _:
                names.append(type(member).__name__.removesuffix("Type").lower())
    return " or ".join(dict.fromkeys(names))


def _with_queue(consumer: Consumer, options: Mapping[str, Any], where: str) -> ConfiguredConsumer:
    """Return a consumer with the queue that its universal options describe."""
    policy = _one_of(options, "policy", tuple(WhenFull), where) or consumer.policy
    if policy != "spill":
        for name in UNIVERSAL_OPTIONS[2:]:
            if name in options:
                raise UsageError(explain(f"{where}.{name}", got=f"policy {policy}", expected="policy spill with it"))
    root = Path(str(options["spool_dir"])) if "spool_dir" in options else None
    if policy == "spill":
        check_root((root or default_root()).absolute(), f"{where}.spool_dir")
    return ConfiguredConsumer.of(
        consumer,
        policy=policy,
        queue_bytes_max=_size(options, "queue_bytes_max", limits.QUEUE_BYTES_MAX, where),
        spool_dir=root,
        spool_bytes=_size(options, "spool_bytes", limits.SPOOL_BYTES_MAX, where),
        spill_fallback=_one_of(options, "spill_fallback", FALLBACKS, where),
    )


def _one_of(options: Mapping[str, Any], name: str, words: Sequence[str], where: str) -> str | None:
    value = options.get(name)
    if value is None or value in words:
        return None if value is None else str(value)
    raise UsageError(explain(f"{where}.{name}", got=value, expected=f"one of {', '.join(words)}"))


def _size(options: Mapping[str, Any], name: str, size_max: int, where: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= size_max:
        expected, do = f"1..{size_max}", "remove it to use the default"
        raise UsageError(explain(f"{where}.{name}", got=value, expected=expected, do=do))
    return number
