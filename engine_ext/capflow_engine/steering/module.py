"""Modules as people write them: in JSON, in a request's body or a file, and as files of vectors.

A module has the vectors and clamps of a request, in fields that may leave out the word `steering`: `vectors`, `prefill_vectors`,
`decode_vectors`, `clamps`, `prefill_clamps`, `decode_clamps`. A safetensors file has vectors alone: tensors `[hidden_size]`
named `HOOK:LAYER`, with `prefill.` or `decode.` before it for a tier; or one tensor `vector`, as `capflow steer` takes it. Whatever
else `capflow_engine.steering.files` reads, such as what `capflow vectors fit` writes, is added at every position.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

MODULE_FIELDS = {
    f"{tier}{kind}": f"{tier}steering_{kind}" for kind in ("vectors", "clamps") for tier in ("", "prefill_", "decode_")
}
"""The fields of a module, and what they are called in the body of a request."""

_TIERS = ("base", "prefill", "decode")
_BEFORE = tuple(f"{tier}." for tier in _TIERS)
_EXPECTED = f"a module in JSON, or a file of vectors ({', '.join(SUFFIXES)})"


def parse_module(said: Any, *, info: ModelInfo | None = None, where: str = "") -> Steering:
    """Return the steering that a module's fields describe; a field that is None says nothing.

    info: the model that it is to fit, if that is known. where: what holds the fields, such as a file. Raises UsageError
    that begins with the path of the field that is wrong, in the words that it was written in.
    """
    before = f"{where}: " if where else ""
    if not isinstance(said, Mapping):
        expected = f"an object with some of {', '.join(MODULE_FIELDS)}"
        raise UsageError(explain(where or "module", got=said, expected=expected))
    written: dict[str, str] = {}  # how a field was written, by what it is called in a request
    for name, value in said.items():
        full = str(MODULE_FIELDS.get(name, name))
        if full not in MODULE_FIELDS.values():
            raise UsageError(explain(f"{before}{name}: unknown", expected=f"one of {', '.join(MODULE_FIELDS)}"))
        if value is None:
            continue
        if full in written:
            raise UsageError(explain(f"{before}{name}: said twice", expected=f"either it or {written[full]}"))
        written[full] = name
    try:
        steering = Steering.parse({full: said[name] for full, name in written.items()})
        if info is not None:
            steering.check(info)
    except UsageError as e:
        raise UsageError(before + _as_written(str(e), written)) from e
    return steering


def _as_written(message: str, written: Mapping[str, str]) -> str:
    """Return a message that begins with a field, with what that field was written as."""
    for full, name in written.items():
        if message.startswith((f"{full}.", f"{full}:")):
            return name + message.removeprefix(full)
    return message


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Name the fields of a module, in the UsageErrors of a block, as `MODULE_FIELDS` does."""
    try:
        yield
    except UsageError as e:
        raise UsageError(_as_written(str(e), {full: name for name, full in MODULE_FIELDS.items()})) from e


def load_module(path: str | os.PathLike[str]) -> Steering:
    """Return the module in a file: of vectors where its name ends so, else JSON. Raises UsageError when it holds none."""
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
        said = jsontext.decode(text)
    except (msgspec.DecodeError, OSError) as e:
        raise UsageError(explain(where, got=str(e), expected=_EXPECTED)) from e
    jsontext.check_keys(text, where)
    return parse_module(said, where=where)


def load_modules(given: Sequence[str], check: Callable[[Steering, Steering], None]) -> dict[str, Steering]:
    """Return the modules in files, `NAME=PATH` each as `--steering-modules` takes them, by name.

    check: as of `SteeringStore`. Raises UsageError for a file that holds no module, and for a module that does not fit.
    """
    modules: dict[str, Steering] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise UsageError(explain("--steering-modules", got=one, expected="NAME=PATH"))
        if name in modules:
            raise UsageError(explain("--steering-modules", got=f"{name} twice", expected="each name once"))
        modules[name] = load_module(path)
        with of_file(path):
            check(modules[name], modules[name])
    return modules


@contextlib.contextmanager
def of_file(path: str) -> Iterator[None]:
    """Name the file, and its fields as it may have written them, in the UsageErrors of a block."""
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
            raise UsageError(explain(f"{path}: {name}", got=f"{site} twice", expected="one tensor for each site"))
        vectors.append(SteeringVector.make(site, tensors[name], where=f"{path}: {name}"))
    base, prefill, decode = (Tier(tuple(tiers[tier])) for tier in _TIERS)
    return Steering(base, prefill, decode)


def _everywhere(path: Path) -> Steering:
    """Return the module that adds the vectors in a file at every position."""
    sites = load_sites(path).items()
    return Steering(Tier(tuple(SteeringVector.make(site, vector, where=str(path)) for site, vector in sites)))


def _unknown_tensor(path: Path, name: str) -> str:
    expected = "HOOK:LAYER, prefill.HOOK:LAYER or decode.HOOK:LAYER, such as post_block:12"
    return explain(f"{path}: tensor", got=name, expected=expected)
