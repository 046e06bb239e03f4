"""The bodies of the steering routes and of their answers, with their descriptions in OpenAPI."""

# No postponed annotations: FastAPI reads these.

from typing import Any, Literal, Self

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from capflow.capture.model import ModelInfo
from capflow.steering.gate import SteeringGate
from capflow.steering.request import Steering, Tier
from capflow_engine.scheduler.calls import EngineState
from capflow_engine.steering.module import MODULE_FIELDS, parse_module
from capflow_engine.steering.store import StoreState

_VECTORS = (
    'Vectors to add, by hook and layer: `{"post_block": {"12": [0.1, …]}}`. An entry is a list of hidden_size numbers '
    'or `{"vector": […], "scale": 2.0}`; `"relative": true` makes the scale relative to the stream\'s norm. '
    'Or packed, for each hook: `{"dtype", "shape", "layer_indices", "data", "scales", "relative"}`.'
)
_CLAMPS = (
    'Clamps, by hook and layer: `{"post_block": {"12": {"vector": […], "min": -1.0, "max": 2.0, "strength": 1.0}}}`. '
    "`value` replaces both bounds; a list holds several directions."
)
_FEATURES = (
    'Features of a sparse autoencoder: `{"sae": "mood", "features": {"123": 4.0, "7": {"set": 0}}}`, or a list. '
    "A number adds as much of the feature's decoder row; `set` sets its activation."
)
_GATES = (
    'Gates, by name: `{"rude": {"hook": "post_block", "layer": 9, "vector": […], "threshold": 1.5}}`. Vectors and '
    'clamps with `"gate": "rude"` act where the score reaches the threshold. `"abort": "stop"` ends the request there.'
)
_PREFILL, _DECODE = "At the prompt's positions only.", "At generated positions only."


def _field(name: str, description: str) -> Any:
    return Field(default=None, validation_alias=AliasChoices(name, MODULE_FIELDS[name]), description=description)


class Tiers(BaseModel):
    """Vectors, clamps and features at every position, at the prompt's positions, and at generated ones; and gates."""

    model_config = ConfigDict(extra="forbid")

    vectors: dict[str, Any] | None = _field("vectors", f"{_VECTORS} At every position.")
    prefill_vectors: dict[str, Any] | None = _field("prefill_vectors", f"{_VECTORS} {_PREFILL}")
    decode_vectors: dict[str, Any] | None = _field("decode_vectors", f"{_VECTORS} {_DECODE}")
    clamps: dict[str, Any] | None = _field("clamps", f"{_CLAMPS} At every position.")
    prefill_clamps: dict[str, Any] | None = _field("prefill_clamps", f"{_CLAMPS} {_PREFILL}")
    decode_clamps: dict[str, Any] | None = _field("decode_clamps", f"{_CLAMPS} {_DECODE}")
    features: dict[str, Any] | list[Any] | None = _field("features", f"{_FEATURES} At every position.")
    prefill_features: dict[str, Any] | list[Any] | None = _field("prefill_features", f"{_FEATURES} {_PREFILL}")
    decode_features: dict[str, Any] | list[Any] | None = _field("decode_features", f"{_FEATURES} {_DECODE}")
    gates: dict[str, Any] | None = _field("gates", _GATES)

    def steering(self, info: ModelInfo) -> Steering:
        """Return the steering, checked against the model. Raises UsageError that begins with the wrong field."""
        return parse_module({name: getattr(self, name) for name in MODULE_FIELDS}, info=info)


class SetBody(Tiers):
    """The vectors and clamps that are to steer every request."""

    replace: bool = Field(
        default=False,
        description="Whether this replaces the whole global state. Else it replaces, in each tier, the vectors at the "
        "sites of its vectors, the clamps and set features at the sites of its own, and gates by their names.",
    )


class ModuleBody(Tiers):
    """A module and its name."""

    name: str = Field(description="The module's name in `steering_name`. A module of this name is replaced.")


class NameBody(BaseModel):
    """The name of a module."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="The name of a registered module.")


class ClearBody(BaseModel):
    """Empty: all of the global state is cleared."""

    model_config = ConfigDict(extra="forbid")


class GainBody(BaseModel):
    """A scale for what an owner contributes."""

    model_config = ConfigDict(extra="forbid")

    owner: str = Field(description="`request`, `global`, `module NAME`, `controller NAME`, or another owner that adds.")
    scale: float = Field(description="1 is the contribution as it came, 0 is none. It replaces an earlier scale.")


class EmptyBody(BaseModel):
    """Empty: all of the engine."""

    model_config = ConfigDict(extra="forbid")


class TierState(BaseModel):
    """The content of one tier."""

    vectors: dict[str, dict[int, float]] = Field(description="By hook and layer, the norm of `scale · vector`.")
    clamps: dict[str, dict[int, int]] = Field(description="By hook and layer, the number of clamps.")
    features: dict[str, dict[int, int]] = Field(
        default_factory=dict, description="By hook and layer, the number of features that are set."
    )

    @classmethod
    def of(cls, tier: Tier) -> Self:
        """Return the content of a tier."""
        vectors: dict[str, dict[int, float]] = {}
        clamps: dict[str, dict[int, int]] = {}
        features: dict[str, dict[int, int]] = {}
        for vector in tier.vectors:
            vectors.setdefault(vector.hook, {})[vector.layer] = float(np.linalg.norm(vector.array(np.float64)))
        for held, parts in ((clamps, tier.clamps), (features, tier.features)):
            for part in parts:
                layers = held.setdefault(part.hook, {})
                layers[part.layer] = layers.get(part.layer, 0) + 1
        return cls(vectors=vectors, clamps=clamps, features=features)


class HeldGate(BaseModel):
    """One gate, without its vector."""

    site: str = Field(description="The probe's site, HOOK:LAYER.")
    score: str = Field(description="`dot`, `cosine` or `cast`.")
    threshold: float = Field(description="The score from which the gate is open.")
    sharpness: float | None = Field(description="Null for a hard gate.")
    latch: bool = Field(description="Whether the gate stays open for the rest of the request.")
    positions: str = Field(description="The scored positions: `all`, `prompt`, `generated` or `last_prompt`.")
    label: str = Field(description="The gate's label.")
    abort: str = Field(description="`stop` or `abort` if the gate may end a request; else empty.")

    @classmethod
    def of(cls, gate: SteeringGate) -> Self:
        """Return a gate's parameters."""
        parts = ("score", "threshold", "sharpness", "latch", "positions", "label", "abort")
        return cls(site=str(gate.site), **{name: getattr(gate, name) for name in parts})


class TiersState(BaseModel):
    """The content of the global state or of a module."""

    base: TierState
    prefill: TierState
    decode: TierState
    gates: dict[str, HeldGate] = Field(default_factory=dict, description="The gates by name.")

    @classmethod
    def of(cls, steering: Steering) -> Self:
        """Return the content of a steering."""
        tiers = {name: TierState.of(getattr(steering, name)) for name in ("base", "prefill", "decode")}
        return cls(**tiers, gates={gate.name: HeldGate.of(gate) for gate in steering.gates})


class ModulesState(BaseModel):
    """The modules that are registered."""

    modules: list[str] = Field(description="Their names, sorted.")
    count: int = Field(description="How many there are.")
    contents: dict[str, TiersState] = Field(description="The content of each.")

    @classmethod
    def of(cls, held: StoreState) -> Self:
        """Return the modules that a store holds."""
        names = sorted(held.modules)
        contents = {name: TiersState.of(held.modules[name]) for name in names}
        return cls(modules=names, count=len(names), contents=contents)


class SteeringState(ModulesState):
    """The global state and the modules."""

    active: bool = Field(description="Whether the global state steers requests.")
    key: str = Field(
        description="The key of the global state, as in the header X-Capflow-Steering of a request that asks for "
        "nothing; `none` if it is empty."
    )
    everywhere: TiersState = Field(serialization_alias="global", description="The global state.")
    generation: int = Field(description="How many changes the state and the modules had.")
    gains: dict[str, float] | None = Field(
        default=None, description="The scale of each owner that has one other than 1; null if the engine says nothing."
    )
    frozen: bool | None = Field(
        default=None, description="Whether the engine is frozen; null if the engine says nothing."
    )
    off: dict[str, str] = Field(
        default={}, description="The features that do not work with this version of vLLM, and for each the reason."
    )


class LayerState(BaseModel):
    """The hooks at which a layer can be steered."""

    hook_points: list[str] = Field(description="The hooks at which it can be steered.")


class LayersState(BaseModel):
    """The model and the sites at which it can be steered."""

    layers: dict[int, LayerState] = Field(description="Each layer that can be steered.")
    sites: list[str] = Field(description="Every site that can be steered, HOOK:LAYER.")
    num_layers: int = Field(description="How many layers the model has.")
    hidden_size: int = Field(description="How many numbers a vector has.")
    dtype: str = Field(description="The dtype of the stream.")


class Done(BaseModel):
    """The change is made. It holds for every later request."""

    status: Literal["ok"] = "ok"


class EngineChanged(Done):
    """The engine has the change. It holds from the next position of each request on, on all ranks."""

    step: int = Field(description="The step from which on it holds.")
    gains: dict[str, float] = Field(description="The scale of each owner that has one other than 1.")
    frozen: bool = Field(description="Whether the engine is frozen.")

    @classmethod
    def of(cls, state: EngineState) -> Self:
        """Return the answer of an engine."""
        return cls(step=state.step, gains=state.gains, frozen=state.frozen)


class Set(Done):
    """The global state is changed."""

    hook_points: list[str] = Field(description="The hooks that were named.")
    layers_updated: list[int] = Field(description="The layers that were named.")
    key: str = Field(description="The key of the new global state; `none` if it does nothing.")


class NamedAnswer(Done):
    """The modules are changed."""

    name: str = Field(description="The module that was registered or forgotten.")
    modules: list[str] = Field(description="The names of all modules now, sorted.")
