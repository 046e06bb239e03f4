"""Arms and their points: what each asks of the engine for a request, and which gates must run beside the engine.

A point of an arm is a `Setting`. Its name begins the ids of its requests, so that a gate can be limited to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capflow.capture.site import Site
from capflow.plugins.configure import escaped
from capflow.probes.probe import Probe
from capflow_models.experiment.file import AXES, Experiment
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.spec import Vector

GATE = "experiment"
"""The name of a request's gate in the graph."""


class Setting(msgspec.Struct, frozen=True):
    """One arm at one point of its sweep; None for an axis that does not matter for it.

    name: the arm's name and the point's number.
    sharpness: inf is a hard gate.
    """

    name: str
    arm: str
    kind: str
    threshold: float | None = None
    sharpness: float | None = None
    scale: float | None = None
    layer: int | None = None

    @property
    def title(self) -> str:
        """The arm with the values of its axes."""
        values = [f"{axis} {value:.3g}" for axis in AXES[self.kind] if (value := getattr(self, axis)) is not None]
        return " ".join([self.arm, *values])

    def layer_key(self, experiment: Experiment) -> tuple[str, ...]:
        """Return the key of the file that gives the layer."""
        return ("arms", self.arm, "layer") if experiment.arms[self.arm].layer else ("sweep", "layer")


class Directions(msgspec.Struct, frozen=True):
    """The probes and vectors of an experiment, as the arms use them.

    probe: of the gates, with its file.
    vectors: by layer, at `hook`.
    held_out: the probe that reads answers.
    """

    probe: Probe | None
    probe_file: Path | None
    vectors: Mapping[int, Vector]
    hook: str
    held_out: Probe | None

    @property
    def threshold(self) -> float:
        """The probe's own threshold."""
        return self.probe.thresholds[0] if self.probe is not None else 0.0


def settings_of(experiment: Experiment, threshold: float) -> list[Setting]:
    """Return the settings of all arms, in the file's order.

    threshold: the probe's own, for arms without one.
    """
    settings = []
    default = {"threshold": (threshold,), "sharpness": (float("inf"),), "scale": (1.0,), "layer": ()}
    for arm, options in experiment.arms.items():
        kind = experiment.kind(arm)
        values = [getattr(options, axis) or getattr(experiment.sweep, axis) or default[axis] for axis in AXES[kind]]
        for number, point in enumerate(product(*values)):
            settings.append(Setting(f"{arm}-{number}", arm, kind, **dict(zip(AXES[kind], point, strict=True))))
    return settings


def random_vector(vector: Vector, seed: int) -> Vector:
    """Return a random direction with the norm of a vector."""
    direction = np.random.default_rng(seed).standard_normal(vector.size)
    scaled: Vector = (direction * (np.linalg.norm(vector) / np.linalg.norm(direction))).astype(np.float32)
    return scaled


def fields_of(setting: Setting, experiment: Experiment, directions: Directions) -> dict[str, Any]:
    """Return the steering fields of a setting's requests; none for arms that something else steers, or nothing."""
    if setting.kind not in ("always_on", "random", "in_graph"):
        return {}
    assert setting.layer is not None
    options = experiment.arms[setting.arm]
    vector = directions.vectors[setting.layer]
    if setting.kind == "random":
        vector = random_vector(vector, options.vector_seed)
    entry: dict[str, Any] = {"vector": vector, "scale": setting.scale}
    fields: dict[str, Any] = {}
    if setting.kind == "in_graph":
        entry["gate"] = GATE
        fields["steering_gates"] = {GATE: _gate(setting, experiment, directions)}
    return {_FIELDS[options.at]: {directions.hook: {setting.layer: entry}}, **fields}


_FIELDS = {
    "all": "steering_vectors", "generated": "decode_steering_vectors", "prompt": "prefill_steering_vectors"
}  # fmt: skip


def _gate(setting: Setting, experiment: Experiment, directions: Directions) -> dict[str, Any]:
    probe = directions.probe
    assert probe is not None
    assert setting.sharpness is not None
    gate = {
        "hook": probe.site.hook,
        "layer": probe.site.layer,
        "vector": probe.weight[0],
        "bias": float(probe.bias[0]),
        "threshold": setting.threshold,
        "latch": experiment.gate.latch,
        "positions": experiment.gate.positions,
    }
    return gate if np.isinf(setting.sharpness) else {**gate, "sharpness": setting.sharpness}


def prompt_of(setting: Setting, experiment: Experiment, prompt: str) -> str:
    """Return the prompt of a setting's request."""
    return experiment.arms[setting.arm].template.replace("{prompt}", prompt) or prompt


def sites_of(settings: Sequence[Setting], directions: Directions) -> list[str]:
    """Return the sites to tap."""
    sites = {Site(setting.layer, directions.hook) for setting in settings if setting.layer is not None}
    sites |= {probe.site for probe in (directions.probe, directions.held_out) if probe is not None}
    return [str(site) for site in sorted(sites)] or ["post_block:*"]


def check_room(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    count: Callable[[str], int],
    length_max: int,
) -> None:
    """Raise UsageError for a prompt whose answer might not fit, with the token that reading prompt and answer makes.

    An arm also generates the baseline's answer, and the model without steering reads every answer.

    count: returns the number of a text's tokens.
    length_max: the most tokens of a request.
    """
    answer = experiment.general.max_tokens
    by_template = {experiment.arms[setting.arm].template: setting for setting in reversed(settings)}
    for setting in by_template.values():
        for prompt in prompts:
            tokens = count(prompt_of(setting, experiment, prompt.prompt))
            if tokens + answer + 1 > length_max:
                got = f"{tokens} tokens in prompt {prompt.id} of arm {setting.arm}, with max_tokens = {answer}"
                expected = f"together at most {length_max - 1}"
                do = "raise max_model_len in [engine], lower max_tokens, or leave the prompt out"
                raise experiment.wrong(("max_tokens",), got=got, expected=expected, do=do)


PLUGINS = {"gated_sync": "gate", "gated_async": "async_gate", "shadow": "gate"}
"""The plugins that run beside the engine for arms, an instance for each setting."""


def instance_of(setting: Setting) -> str | None:
    """Return the name of a setting's own plugin; None if it has none."""
    plugin = PLUGINS.get(setting.kind)
    return None if plugin is None else f"{plugin}@{setting.name}"


def gates_of(
    settings: Sequence[Setting], experiment: Experiment, directions: Directions, files: Mapping[int, Path]
) -> list[str]:
    """Return the `--consumer` options of the gates that run beside the engine, one for each setting.

    files: a vector's file, by layer. A shadow gate has none.
    """
    consumers = []
    for setting in settings:
        instance = instance_of(setting)
        if instance is None:
            continue
        options: dict[str, Any] = {
            "probe": directions.probe_file,
            "threshold": repr(setting.threshold),
            "requests": f"{setting.name}.*",
        }
        if setting.layer is not None:
            options |= {"vector": files[setting.layer], "scale": repr(setting.scale)}
        if setting.kind == "gated_async":
            options["capture"] = "requests"
        else:
            options["positions"] = POSITIONS[experiment.gate.positions]
        if not experiment.gate.latch:
            options["release"] = repr(setting.threshold)
        if setting.kind == "shadow":
            options["shadow"] = "true"
        consumers.append(f"{instance}:{','.join(f'{name}={escaped(value)}' for name, value in options.items())}")
    return consumers


POSITIONS = {"all": "all", "last_prompt": "last_prompt", "prompt": "all_prompt", "generated": "all_generated"}
"""The positions of gates, as captures name them."""


def check_layers(
    settings: Sequence[Setting],
    experiment: Experiment,
    *,
    probe: Site | None,
    hook: str,
    layers: Collection[int] | None,
) -> None:
    """Raise UsageError for a layer without a vector, and for a gate in the graph whose vector lies before its probe.

    probe: the gate's site, if it is known.
    hook, layers: where the vectors are added; None for layers that are not known yet.
    """
    for setting in settings:
        if setting.layer is None:
            continue
        key = setting.layer_key(experiment)
        if layers is not None and setting.layer not in layers:
            expected = f"a layer with a vector: {', '.join(map(str, layers))}"
            raise experiment.wrong(key, got=setting.layer, expected=expected)
        if setting.kind == "in_graph" and probe is not None:
            site = Site(setting.layer, hook)
            if not (probe.precedes(site) or (site == probe and not experiment.gate.latch)):
                expected = f"a layer after the probe's site, {probe}"
                do = "or write latch = false in [gate]" if site == probe else ""
                raise experiment.wrong(key, got=setting.layer, expected=expected, do=do)
