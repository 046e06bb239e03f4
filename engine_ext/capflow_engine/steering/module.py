"""Modules as users write them: JSON in a request's body or in a file, and files of vectors.

A module has the vectors, clamps, features and gates of a request. Its fields may omit the word `steering`: `vectors`,
`prefill_vectors`, `decode_vectors`, `clamps`, `features` and so on, `gates`. A safetensors file has
vectors only: `[hidden_size]` tensors named `HOOK:LAYER`, with `prefill.` or `decode.` before the name of one for a
single tier; or one tensor `vector`, as for `capflow steer`. Other files that `capflow_engine.steering.files` reads,
such as those of `capflow vectors fit`, hold vectors that are added at every position.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.probe import load_vector
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow.text import jsontext
from capflow_engine.steering.files import SUFFIXES, load_sites, read
from capflow_engine.steering.fit import Fit

MODULE_FIELDS = {
    f"{tier}{kind}": f"{tier}steering_{kind}"
    for kind in ("vectors", "clamps", "features")
    for tier in ("", "prefill_", "decode_")
} | {"gates": "steering_gates"}
"""The fields of a module, and their names in the body of a request."""

_TIERS = ("base", "prefill", "decode")
_BEFORE = tuple(f"{tier}." for tier in _TIERS)
_EXPECTED = f"a module in JSON, or a file of vectors ({', '.join(SUFFIXES)})"


def parse_module(fields: Any, *, info: ModelInfo | None = None, where: str = "") -> Steering:
    """Return the steering that a module's fields describe; a field with the value None is ignored.

    Raises UsageError, which begins with the path of the wrong field as the user wrote it.

    info: the model that the module must fit; None to skip that check.
    where: the source of the fields, such as a file; the error begins with it.
    """
    before = f"{where}: " if where else ""
    if not isinstance(fields, Mapping):
        expected = f"an object with some of {', '.join(MODULE_FIELDS)}"
        raise UsageError(explain(where or "module", got=fields, expected=expected))
    # The user's name of each field, by the request's name.
    written: dict[str, str] = {}
    for name, value in fields.items():
        full = str(MODULE_FIELDS.get(name, name))
        if full not in MODULE_FIELDS.values():
            raise UsageError(explain(f"{before}{name}: unknown", expected=f"one of {', '.join(MODULE_FIELDS)}"))
        if value is None:
            continue
        if full in written:
            raise UsageError(explain(f"{before}{name}: given twice", expected=f"either it or {written[full]}"))
        written[full] = name
    try:
        steering = Steering.parse({full: fields[name] for full, name in written.items()})
        if info is not None:
            steering.check(info)
    except UsageError as e:
        raise UsageError(before + _as_written(str(e), written)) from e
    return steering


def _as_written(message: str, written: Mapping[str, str]) -> str:
    """Return a message with the user's name of the field that it begins with."""
    for full, name in written.items():
        if message.startswith((f"{full}.", f"{full}:")):
            return name + message.removeprefix(full)
    return message


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Use the module's names of fields, instead of the request's, in the UsageErrors of a block."""
    try:
        yield
    except UsageError as e:
        raise UsageError(_as_written(str(e), {full: name for name, full in MODULE_FIELDS.items()})) from e


def load_module(path: str | os.PathLike[str]) -> Steering:
    """Return the module in a file: vectors if the suffix is one of `SUFFIXES`, otherwise JSON.

    Raises UsageError if the file holds no module.
    """
    where = os.fspath(path)
    if not Path(path).is_file():
        raise UsageError(explain(where, got="no such file", expected=_EXPECTED))
    suffix = Path(path).suffix.lower()
    if suffix == ".safetensors":
        return _from_tensors(Path(path))
    if suffix in SUFFIXES:
        return _everywhere(Path(path))
    try:
        text = Path(path).read_bytes()
        fields = jsontext.decode(text)
    except (msgspec.DecodeError, OSError) as e:
        raise UsageError(explain(where, got=str(e), expected=_EXPECTED)) from e
    jsontext.check_keys(text, where)
    return parse_module(fields, where=where)


def load_modules(given: Sequence[str], fit: Fit) -> dict[str, Steering]:
    """Return the modules in files, by name, with their features resolved.

    Raises UsageError for a file that holds no module, and for a module that does not fit.

    given: the values of `--steering-modules`, each `NAME=PATH`.
    """
    modules: dict[str, Steering] = {}
    for option in given:
        name, equals, path = option.partition("=")
        if not (name and equals and path):
            raise UsageError(explain("--steering-modules", got=option, expected="NAME=PATH"))
        if name in modules:
            raise UsageError(explain("--steering-modules", got=f"{name} twice", expected="each name once"))
        module = load_module(path)
        with of_file(path):
            modules[name] = fit.resolved(module)
            fit.check(modules[name], modules[name])
    return modules


@contextlib.contextmanager
def of_file(path: str) -> Iterator[None]:
    """Name the file, and the module's names of fields, in the UsageErrors of a block."""
    try:
        with as_written():
            yield
    except UsageError as e:
        raise UsageError(f"{path}: {e}") from e


def _from_tensors(path: Path) -> Steering:
    tensors = read(path)
    if set(tensors) == {"vector"}:
        return Steering(base=Tier((load_vector(path),)))
    if not any(":" in str(name) or str(name).startswith(_BEFORE) for name in tensors):
        return _everywhere(path)
    tiers: dict[str, list[SteeringVector]] = {tier: [] for tier in _TIERS}
    for name in sorted(map(str, tensors)):
        tier, dot, text = name.rpartition(".")
        if dot and tier not in _TIERS:
            raise UsageError(_unknown_tensor(path, name))
        try:
            site = Site.parse(text)
        except UsageError as e:
            raise UsageError(_unknown_tensor(path, name)) from e
        vectors = tiers[tier or "base"]
        if any(vector.site == site for vector in vectors):
            raise UsageError(explain(f"{path}: {name}", got=f"{site} twice", expected="one tensor per site"))
        vectors.append(SteeringVector.make(site, tensors[name], where=f"{path}: {name}"))
    base, prefill, decode = (Tier(tuple(tiers[tier])) for tier in _TIERS)
    return Steering(base, prefill, decode)


def _everywhere(path: Path) -> Steering:
    """Return the module that adds a file's vectors at every position."""
    sites = load_sites(path).items()
    return Steering(Tier(tuple(SteeringVector.make(site, vector, where=str(path)) for site, vector in sites)))


def _unknown_tensor(path: Path, name: str) -> str:
    expected = "HOOK:LAYER, prefill.HOOK:LAYER or decode.HOOK:LAYER, such as post_block:12"
    return explain(f"{path}: tensor", got=name, expected=expected)
