"""The interface of a steerable model: it has one specification, and answers prompts steered by it.

A back end names its sites and runs jobs. Everything else is here, the same for all back ends.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from capflow.capture.model import ModelInfo
from capflow.capture.site import HOOK_DEFAULT, Site
from capflow.errors import UsageError, explain
from capflow.steering import plain
from capflow.steering.request import Steering
from capflow.text.brief import brief
from capflow_engine.steering.store import SteeringStore
from capflow_models.spec import (
    AblationSpec,
    LayerSteeringSpec,
    ProjectionCapSpec,
    SteeringSpec,
    join,
    site_of,
)
from capflow_models.specfiles import load_spec, save_spec

Prompt = str | Sequence[int]
"""A text, or token ids."""

Rows = Mapping[Site, npt.NDArray[np.float32]]
"""Rows `[prompts, hidden_size]`, or those of one prompt, `[tokens, hidden_size]`, by site."""

_TOKENS_MAX = 1 << 20
_SEED_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are sampled.

    temperature: 0 takes the most likely token.
    top_p: sample from the most likely tokens that together have this probability.
    seed: None for a random one.
    ignore_eos: whether to continue after the end token.

    Raises UsageError that names the invalid field.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        plain.whole(self.max_new_tokens, "max_new_tokens", 1, _TOKENS_MAX, "a count")
        if plain.number(self.temperature, "temperature") < 0:
            raise UsageError(explain("temperature", got=self.temperature, expected="0 or more"))
        if not 0 < plain.number(self.top_p, "top_p") <= 1:
            raise UsageError(explain("top_p", got=self.top_p, expected="above 0 and at most 1"))
        if self.seed is not None:
            plain.whole(self.seed, "seed", 0, _SEED_MAX, "a seed")


@dataclass(frozen=True)
class Job:
    """One prompt with its whole steering and its sampling."""

    prompt: Prompt
    steering: Steering
    sampling: Sampling

    __repr__ = brief


@dataclass(frozen=True)
class Completion:
    """One answer.

    text: empty if the model has no tokenizer.
    token_ids: the generated tokens, including the end token.
    prompt_token_ids: the prompt's tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]

    __repr__ = brief


class SteerableModel(ABC):
    """A model with a specification that steers it until it is changed.

    Each method that takes a layer also takes a `hook` of that layer; `post_block` is the stream that leaves the layer.
    Settings are checked when they are made: a UsageError names the field, and the earlier settings stay.

    info: the model's name and sizes, and the sites that can be steered.
    modules: the steering modules that a request may name, and the global state, which steers every request.
    other_hooks: what to do to steer further hooks.
    """

    other_hooks: ClassVar[str]

    def __init__(self, info: ModelInfo, modules: SteeringStore) -> None:
        self.info = info
        self.modules = modules
        self._spec = SteeringSpec()
        # Where `set_vector` adds its vector; None until `set_target_layer`.
        self._target: Site | None = None

    # The specification.

    def set_target_layer(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Choose the layer at which `set_vector` adds its vector. Settings of other layers stay."""
        site = site_of(layer, hook)
        self._check_site(site)
        self._target = site

    def set_vector(self, vector: Any, scale: float = 1.0, *, relative: bool = False) -> None:
        """Call `set_layer_vector` with the target layer; None removes its vector."""
        if self._target is None:
            raise UsageError(explain("set_vector: no target layer", do="call set_target_layer first"))
        layer, hook = self._target
        if vector is None:
            self.clear_layer_vector(layer, hook=hook)
        else:
            self.set_layer_vector(layer, vector, scale, relative=relative, hook=hook)

    def set_layer_vector(
        self, layer: int, vector: Any, scale: float = 1.0, *, relative: bool = False, hook: str = HOOK_DEFAULT
    ) -> None:
        """Add `scale · vector` to the stream at a layer, in place of the layer's present vector.

        vector: `[hidden_size]`.
        relative: whether to scale the vector to length 1, and multiply it by the stream's norm at each token.
        """
        self._change(layer, hook, vector=vector, scale=scale, relative=relative)

    def set_layer_projection_cap(
        self,
        layer: int,
        vector: Any,
        cap_below: float | None = None,
        cap_above: float | None = None,
        *,
        hook: str = HOOK_DEFAULT,
    ) -> None:
        """Keep the stream's projection on a direction at or above `cap_below` and at or below `cap_above`.

        vector: the direction, `[hidden_size]`; it is scaled to length 1.
        cap_below, cap_above: in the stream's units; None for no bound.
        """
        self._change(layer, hook, projection_cap=ProjectionCapSpec(vector, cap_below, cap_above))

    def set_layer_ablation(self, layer: int, vector: Any, scale: float = 0.0, *, hook: str = HOOK_DEFAULT) -> None:
        """Multiply the stream's projection on a direction by `scale`.

        0 removes the direction (Arditi et al. 2024, arXiv:2406.11717).
        """
        self._change(layer, hook, ablation=AblationSpec(vector, scale))

    def clear_layer_vector(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Remove the vector of a layer."""
        self._change(layer, hook, vector=None, scale=1.0, relative=False)

    def clear_layer_projection_cap(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Remove the projection cap of a layer."""
        self._change(layer, hook, projection_cap=None)

    def clear_layer_ablation(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Remove the ablation of a layer."""
        self._change(layer, hook, ablation=None)

    def clear_all_vectors(self) -> None:
        """Remove the vectors of all layers; caps and ablations stay."""
        for site, _ in list(self._spec.sites()):
            self.clear_layer_vector(site.layer, hook=site.hook)

    def clear_all(self) -> None:
        """Remove all steering of the specification."""
        self._spec = SteeringSpec()

    def export_steering_spec(self) -> SteeringSpec:
        """Return the present specification; it is immutable."""
        return self._spec

    def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Replace the specification. Raises UsageError when the new one does not fit the model."""
        self._check(spec.steering())
        self._spec = spec

    @contextmanager
    def steering(self, spec: SteeringSpec) -> Iterator[Self]:
        """Replace the specification while a block runs; the earlier one returns when the block ends or fails."""
        before = self._spec
        self.apply_steering_spec(spec)
        try:
            yield self
        finally:
            self._spec = before

    # Files.

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the specification and the model's name to a directory that `load` reads. Weights are not written."""
        save_spec(directory, self.info.name, self._spec)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], **arguments: Any) -> Self:
        """Return the model that a directory names, with the directory's specification.

        arguments: further arguments of this class.
        """
        name, spec = load_spec(directory)
        # Each back end's first argument is a name.
        model = cls(name, **arguments)  # type: ignore[arg-type]
        try:
            model.apply_steering_spec(spec)
        except BaseException:
            model.close()
            raise
        return model

    # Requests.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        steering: Steering | None = None,
    ) -> list[str]:
        """Return the text of an answer to each prompt; a list of one text for a single prompt.

        steering: further steering of these prompts, which may be limited to phases and positions.
        """
        sampling = Sampling(max_new_tokens, temperature, top_p, seed, ignore_eos)
        return [done.text for done in self.complete(prompts, sampling, steering=steering)]

    def complete(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | None = None, *, steering: Steering | None = None
    ) -> list[Completion]:
        """Return an answer to each prompt with its tokens.

        steering: further steering of these prompts.
        """
        chosen = sampling or Sampling()
        return self.run([Job(p, self.steered(steering), chosen) for p in _prompts(prompts)])

    def logprobs(
        self, prompts: Prompt | Sequence[Prompt], *, steering: Steering | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the natural log probabilities of the token after each prompt, `[prompts, vocabulary]` float32."""
        return self._logprobs(_prompts(prompts), self.steered(steering))

    def last_rows(
        self, prompts: Prompt | Sequence[Prompt], sites: Sequence[Site], *, steering: Steering | None = None
    ) -> Rows:
        """Return the stream at each prompt's last token: for each site, `[prompts, hidden_size]` float32.

        Rows are taken before the site itself is steered.
        """
        for site in sites:
            self._check_site(site)
        return self._last_rows(_prompts(prompts), sites, self.steered(steering))

    def prompt_rows(
        self, prompts: Prompt | Sequence[Prompt], sites: Sequence[Site], *, steering: Steering | None = None
    ) -> list[Rows]:
        """Return the stream at every token of each prompt: for each site, `[tokens, hidden_size]` float32.

        Rows are taken before the site itself is steered.
        """
        for site in sites:
            self._check_site(site)
        return self._prompt_rows(_prompts(prompts), sites, self.steered(steering))

    def token_logprobs(
        self, prompts: Prompt | Sequence[Prompt], *, steering: Steering | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """Return the natural log probability of each token of each prompt but the first, `[tokens - 1]` float32."""
        return self._token_logprobs(_prompts(prompts), self.steered(steering))

    def steered(self, steering: Steering | None = None) -> Steering:
        """Return the specification joined with further steering. Raises UsageError when that does not fit."""
        if steering is None:
            return self._spec.steering()
        self._check(steering)
        return join(self._spec.steering(), steering)

    # Not abstract: most back ends have nothing to release.
    def close(self) -> None:  # noqa: B027
        """Release the model's resources. It must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The back end.

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> list[Completion]:
        """Return the answers to jobs, in order. Each job's steering is complete; the specification is not added."""

    @abstractmethod
    def _logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> npt.NDArray[np.float32]: ...

    @abstractmethod
    def _last_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> Rows: ...

    @abstractmethod
    def _prompt_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> list[Rows]: ...

    @abstractmethod
    def _token_logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> list[npt.NDArray[np.float32]]: ...

    @abstractmethod
    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids."""

    @property
    def length_max(self) -> int | None:
        """How many tokens a prompt and its answer may have together; None if there is no bound."""
        return None

    @property
    @abstractmethod
    def hooks(self) -> tuple[str, ...]:
        """The hooks that can be steered."""

    def _check_site(self, site: Site) -> None:
        if site.hook not in self.hooks:
            expected = f"one of {', '.join(self.hooks)}"
            raise UsageError(explain("hook", got=site.hook, expected=expected, do=self.other_hooks))
        if site.layer >= self.info.num_layers:
            raise UsageError(explain("layer", got=site.layer, expected=f"0..{self.info.num_layers - 1}"))

    def _check(self, steering: Steering) -> None:
        for _, part in steering.parts():
            self._check_site(part.site)
        steering.check(self.info)

    def _change(self, layer: int, hook: str, **changes: Any) -> None:
        site = site_of(layer, hook)
        self._check_site(site)
        changed: LayerSteeringSpec = replace(self._spec.at(site), **changes)
        self.apply_steering_spec(self._spec.with_layer(site, changed))


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise UsageError(explain("prompts", got=prompts, expected="a text, a list of token ids, or a list of these"))
    items: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
    for index, prompt in enumerate(items):
        if not prompt or not (isinstance(prompt, str) or _is_ids(prompt)):
            raise UsageError(explain(f"prompts.{index}", got=prompt, expected="a text or a list of token ids"))
    return items


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(token, int) for token in prompt)
