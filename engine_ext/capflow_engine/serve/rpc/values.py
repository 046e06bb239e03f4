"""Converts messages of `capflow.proto` to the plain values of bodies over HTTP, and back.

Invariants: a message with a field that is not in the schema is refused, at any depth. Bytes stay bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from google.protobuf import json_format, struct_pb2
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from capflow.errors import UsageError, explain
from capflow_engine.serve.http.steering_bodies import TiersState, TierState
from capflow_engine.serve.rpc import capflow_pb2 as pb
from capflow_engine.steering.applied import SteeringSummary

M = TypeVar("M", bound=Message)


def fields_of(message: Message, where: str = "") -> dict[str, Any]:
    """Return the fields of a message that are set, by name, as in the body of a route.

    where: the path of the message; empty for a whole request.
    Raises UsageError that begins with the path of the wrong field.
    """
    if len(unknown := UnknownFieldSet(message)):
        number = unknown[0].field_number
        do = "make the client of this server's capflow.proto"
        raise UsageError(
            explain(where or "request", got=f"an unknown field, number {number}", expected="known fields", do=do)
        )
    before = f"{where}." if where else ""
    values = {}
    for field, value in message.ListFields():
        values[field.name] = _value(value, f"{before}{field.name}")
    if isinstance(message, pb.HookVectors | pb.HookClamps | pb.HookPatches):
        return {**values.pop("layers", {}), **values}  # the parser refuses both forms at once
    if isinstance(message, pb.Clamp) and "values" in values:
        given = values.pop("values")
        if "value" in values:
            raise UsageError(explain(f"{before}values: given beside value", expected="one of both"))
        values["value"] = given
    return values


def parsed(value: Mapping[str, Any], message: M) -> M:
    """Return a message with its fields set from plain values. Values without a field are left out."""
    json_format.ParseDict(msgspec.to_builtins(value, str_keys=True), message, ignore_unknown_fields=True)
    return message


def applied_message(applied: SteeringSummary) -> pb.SteeringApplied:
    """Return the summary of a request's steering as a message."""
    values = msgspec.to_builtins(applied)
    return parsed(
        {**values, "patched": {at: {"sites": sites} for at, sites in values["patched"].items()}}, pb.SteeringApplied()
    )


def tiers_message(state: TiersState) -> pb.TiersState:
    """Return the content of the global state or a module as a message."""
    gates = [pb.AppliedGate(name=name, **gate.model_dump()) for name, gate in state.gates.items()]
    return pb.TiersState(base=_tier(state.base), prefill=_tier(state.prefill), decode=_tier(state.decode), gates=gates)


def _tier(state: TierState) -> pb.TierState:
    held = {name: _by_site(getattr(state, name)) for name in ("vectors", "clamps", "features")}
    return pb.TierState(**held)


def _by_site(held: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    return {f"{hook}:{layer}": each for hook, layers in held.items() for layer, each in layers.items()}


def _value(value: Any, where: str) -> Any:
    if isinstance(value, struct_pb2.Struct):
        return {name: _json(each) for name, each in value.fields.items()}
    if isinstance(
        value, pb.TokenIds | pb.LayerVectors | pb.LayerClamps | pb.LayerPatches
    ):  # lists need a message of their own
        return next(iter(fields_of(value, where).values()), [])
    if isinstance(value, Message):
        return fields_of(value, where)
    if isinstance(value, Mapping):
        return {key: _value(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, str | bytes | int | float):
        return value
    if not isinstance(value[0], Message):
        return list(value)
    return [_value(each, f"{where}.{n}") for n, each in enumerate(value)]


def _json(value: struct_pb2.Value) -> Any:
    """Return JSON's value, its whole numbers as such: a Struct has nothing but float64."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return {name: _json(each) for name, each in value.struct_value.fields.items()}
    if kind == "list_value":
        return [_json(each) for each in value.list_value.values]
    if kind == "number_value" and value.number_value.is_integer():
        return int(value.number_value)
    return None if kind in (None, "null_value") else getattr(value, kind)
