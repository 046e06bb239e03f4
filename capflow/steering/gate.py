"""Gates: probes that decide, in the same forward pass, how strongly other parts of a steering act.

A gate scores the stream `x` at its site, before anything steers it there:

| score | value |
|---|---|
| `dot` | `x · vector + bias` |
| `cosine` | `x · vector / (‖x‖ ‖vector‖)` |
| `cast` | `cos(x, tanh(proj x))` with `proj x = (x · vector) / (vector · vector) · vector` (arXiv:2409.05907) |

A vector, a clamp or a patch that names the gate is multiplied by the gate's value: 1 where the score reaches the
threshold, else 0; with a sharpness, `sigmoid(sharpness · (score - threshold))`. At positions that the gate does not
score, the value is 0. A latched gate has at each position the largest of its values so far.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import HOOK_DEFAULT, HOOKS, Site, hook_named
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.packed import FIELDS, Packed
from capflow.steering.vector import AtSite

SCORE_NAMES = ("dot", "cosine", "cast")
POSITION_NAMES = ("all", "prompt", "generated", "last_prompt")
ABORT_NAMES = ("stop", "abort")

_KEYS = (
    "hook", "layer", "vector", "bias", "threshold", "score", "sharpness", "latch", "positions", "label",
    "abort",
)  # fmt: skip
_EXAMPLE = '{"rude": {"layer": 9, "vector": [0.1, …], "threshold": 1.5}}'
_NAME_EXPECTED = f"a name of 1..{limits.GATE_NAME_LENGTH_MAX} printable characters without /"


class SteeringGate(AtSite, frozen=True, forbid_unknown_fields=True):
    """One gate.

    name: as vectors, clamps and patches of the same steering name it.
    data: the vector, `[hidden_size]` float32 little-endian.
    bias: is added to a score of kind `dot`.
    sharpness: None for a hard gate.
    latch: whether the gate keeps its largest value for the rest of the request.
    positions: the scored positions, one of `POSITION_NAMES`.
    label: is shown beside the gate's scores.
    abort: the status, one of `ABORT_NAMES`, with which the gate ends the request when it opens; empty: it ends none.
    """

    name: str
    layer: int
    hook: str
    data: bytes
    bias: float = 0.0
    threshold: float = 0.0
    score: str = "dot"
    sharpness: float | None = None
    latch: bool = False
    positions: str = "all"
    label: str = ""
    abort: str = ""

    @property
    def row(self) -> npt.NDArray[np.float32]:
        """The vector, `[hidden_size]`; at unit length if only its direction counts."""
        values = np.frombuffer(self.data, np.float32)
        if self.score == "dot":
            return values
        exact = values.astype(np.float64)
        exact /= np.abs(exact).max()
        unit: npt.NDArray[np.float32] = (exact / np.linalg.norm(exact)).astype(np.float32) + np.float32(0)
        return unit

    def acts_at(self, site: Site) -> bool:
        """Return whether operations at a site can use the gate.

        Tokens of one forward pass cannot read each other's scores at the probe's site, so a latch acts after it.
        """
        return self.site.precedes(site) or (site == self.site and not self.latch)

    def needs_row(self, part: int) -> str:
        """Return what it is, as `AtSite.needs_row` does: every rank acts by its score."""
        del part
        return "a gate's score"

    def check(self, sites: Collection[Site], row: int | tuple[int, ...], *, where: str = "steering_gates") -> None:
        """Raise UsageError unless the gate fits a model with these tapped sites and rows of this width or shape.

        where: the field that holds the gates.
        """
        field = f"{where}.{self.name}"
        self.check_values(field)
        self.site.check_tapped(sites, field)
        plain.check_width(self.width, row, f"{field}.vector")

    def check_values(self, field: str) -> None:
        """Raise UsageError for a value that no model's gate can have.

        field: the gate's field.
        """
        if self.hook not in HOOKS:
            raise UsageError(explain(f"{field}.hook", got=self.hook, expected=f"one of {', '.join(HOOKS)}"))
        for name, given, names in (("score", self.score, SCORE_NAMES), ("positions", self.positions, POSITION_NAMES)):
            if given not in names:
                raise UsageError(explain(f"{field}.{name}", got=given, expected=f"one of {', '.join(names)}"))
        if self.abort not in ("", *ABORT_NAMES):
            expected = f"one of {', '.join(ABORT_NAMES)}"
            raise UsageError(explain(f"{field}.abort", got=reprlib.repr(self.abort), expected=expected))
        if not isinstance(self.label, str) or len(self.label) > limits.TAG_LENGTH_MAX or not self.label.isprintable():
            expected = f"at most {limits.TAG_LENGTH_MAX} printable characters"
            raise UsageError(explain(f"{field}.label", got=reprlib.repr(self.label), expected=expected))
        plain.number(self.threshold, f"{field}.threshold")
        plain.number(self.bias, f"{field}.bias")
        if not abs(self.bias - self.threshold) <= plain.NUMBER_MAX:
            got, expected = f"{self.threshold:g} with bias {self.bias:g}", "a difference of float32's range"
            raise UsageError(explain(f"{field}.threshold", got=got, expected=expected))
        if self.sharpness is not None and plain.number(self.sharpness, f"{field}.sharpness") <= 0.0:
            do = "leave it out for a hard gate"
            raise UsageError(explain(f"{field}.sharpness", got=self.sharpness, expected="a number above 0", do=do))
        values = np.frombuffer(self.data, np.float32) if self.data and len(self.data) % 4 == 0 else np.empty(0)
        if not values.size:
            raise UsageError(explain(f"{field}.vector", got=f"{self.width:g} numbers", expected="[hidden_size]"))
        plain.check_finite(values, f"{field}.vector")
        if self.score == "dot":
            return
        if self.bias != 0.0:
            expected = f"none, as the score is {self.score}"
            raise UsageError(explain(f"{field}.bias", got=self.bias, expected=expected, do="change the threshold"))
        if not values.any():
            expected = f"a direction, as the score is {self.score}"
            raise UsageError(explain(f"{field}.vector", got="a zero vector", expected=expected))


def parse_gates(value: Any, *, where: str = "steering_gates") -> tuple[SteeringGate, ...]:
    """Return the gates that a plain value describes: `{name: gate}`.

    A gate is `{"hook": "post_block", "layer": 9, "vector": [hidden_size], "bias": 0, "threshold": 0, "score": "dot",
    "sharpness": None, "latch": False, "positions": "all", "label": "", "abort": ""}`; the layer and the vector are
    required. The vector is a list, an array, a tensor, or packed as `{"dtype", "shape", "data"}` (see
    `capflow.steering.packed`).

    Raises UsageError with the field first. Parsed gates are returned unchanged.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(each, SteeringGate) for each in value):
        gates = tuple(value)
    else:
        if not isinstance(value, Mapping) or not value:
            raise UsageError(explain(where, got=reprlib.repr(value), expected=f"a mapping like {_EXAMPLE}"))
        gates = tuple(_gate(name, gate, where) for name, gate in value.items())
    check_names(gates, where)
    return gates


def check_names(gates: Sequence[SteeringGate], where: str) -> None:
    """Raise UsageError for a wrong name, a name that comes twice, and too many gates.

    where: the field that holds the gates.
    """
    seen: set[str] = set()
    for gate in gates:
        name = gate.name
        check_name(name, where)
        if name in seen:
            raise UsageError(explain(where, got=f"{name} twice", expected="each name once"))
        seen.add(name)
    if len(gates) > limits.GATES_MAX:
        raise UsageError(explain(where, got=f"{len(gates)} gates", expected=f"at most {limits.GATES_MAX}"))


def check_name(name: Any, field: str) -> None:
    """Raise UsageError unless `name` may be the name of a gate."""
    fits = isinstance(name, str) and 0 < len(name) <= limits.GATE_NAME_LENGTH_MAX
    if not fits or not name.isprintable() or "/" in name:
        raise UsageError(explain(field, got=reprlib.repr(name), expected=_NAME_EXPECTED))


def _gate(name: Any, entry: Any, where: str) -> SteeringGate:
    check_name(name, where)
    field = f"{where}.{name}"
    if not isinstance(entry, Mapping):
        raise UsageError(explain(field, got=reprlib.repr(entry), expected="a gate, a mapping"))
    plain.check_keys(entry, field, _KEYS, ("layer", "vector"))
    given = {key: value for key, value in entry.items() if value is not None}
    hook = hook_named(given.get("hook", HOOK_DEFAULT))
    if hook is None:
        got = reprlib.repr(given["hook"])
        raise UsageError(explain(f"{field}.hook", got=got, expected=f"one of {', '.join(HOOKS)}"))
    numbers = ("bias", "threshold", "sharpness")
    values: dict[str, Any] = {key: plain.number(given[key], f"{field}.{key}") for key in numbers if key in given}
    if not isinstance(given.get("latch", False), bool):
        raise UsageError(explain(f"{field}.latch", got=reprlib.repr(given["latch"]), expected="true or false"))
    values |= {key: given[key] for key in ("score", "latch", "positions", "label", "abort") if key in given}
    data = _vector(entry["vector"], f"{field}.vector").tobytes()
    gate = SteeringGate(name, plain.layer_number(entry["layer"], f"{field}.layer"), hook, data, **values)
    gate.check_values(field)
    return gate


def _vector(value: Any, field: str) -> npt.NDArray[np.float32]:
    if isinstance(value, Mapping):
        plain.check_keys(value, field, FIELDS, FIELDS)
        return Packed.read(value, field, (1,)).array().astype(np.float32)
    return plain.vector(value, field).astype(np.float32)


def sharpness_of(gate: SteeringGate) -> float:
    """Return a gate's sharpness; inf for a hard gate."""
    return math.inf if gate.sharpness is None else gate.sharpness
