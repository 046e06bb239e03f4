"""The interface of a steerable model: it holds one specification, and answers prompts steered by it.

A back end says which sites it has and runs jobs; everything else is here and the same for all.
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
"""A text, or the ids of its tokens."""

Rows = Mapping[Site, npt.NDArray[np.float32]]

_TOKENS_MAX = 1 << 20
_SEED_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How an answer is chosen.

    temperature: 0 takes the likeliest token.
    top_p: of the likeliest tokens that have this much.

    Raises UsageError naming the field that is wrong.
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
    """One prompt, all that steers it, and how it is answered."""

    prompt: Prompt
    steering: Steering
    sampling: Sampling

    __repr__ = brief


@dataclass(frozen=True)
class Completion:
    """One answer.

    text: empty where the model has no tokenizer.
    token_ids: the generated ones, the end's included.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]

    __repr__ = brief


class SteerableModel(ABC):
    """A model, and what steers it until it is changed.

    Every method that takes a layer takes the `hook` there too; `post_block` is the stream as the layer leaves it. What is set
    is checked when it is set: a UsageError names the field, and what held before still holds.

    info: the model's name, sizes and the sites that can be steered.
    modules: those that a call's `steering_name` may name, and the global state, which steers every call.
    other_hooks: how to come by hooks that cannot be steered.
    """

    other_hooks: ClassVar[str]

    def __init__(self, info: ModelInfo, modules: SteeringStore) -> None:
        self.info = info
        self.modules = modules
        self._spec = SteeringSpec()
        # Where `set_vector` adds its vector; until `set_target_layer` says it nowhere.
        self._target: Site | None = None

    # what steers

    def set_target_layer(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Say where `set_vector` adds its vector; what is set at another layer stays."""
        site = site_of(layer, hook)
        self._check_site(site)
        self._target = site

    def set_vector(self, vector: Any, scale: float = 1.0, *, relative: bool = False) -> None:
        """Do as `set_layer_vector` at the target layer; None adds nothing there any more."""
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
        """Add `scale · vector` to the stream at a layer, `[hidden_size]`, in the place of the vector that was set there.

        relative: bring the vector to length 1, and multiply it by the stream's norm at each token besides.
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

        The direction, `[hidden_size]`, is brought to length 1; bounds are in the stream's units.
        """
        self._change(layer, hook, projection_cap=ProjectionCapSpec(vector, cap_below, cap_above))

    def set_layer_ablation(self, layer: int, vector: Any, scale: float = 0.0, *, hook: str = HOOK_DEFAULT) -> None:
        """Multiply the stream's projection on a direction by `scale`; 0 removes it (Arditi et al. 2024, arXiv:2406.11717)."""
        self._change(layer, hook, ablation=AblationSpec(vector, scale))

    def clear_layer_vector(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Add nothing at a layer any more."""
        self._change(layer, hook, vector=None, scale=1.0, relative=False)

    def clear_layer_projection_cap(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Cap nothing at a layer any more."""
        self._change(layer, hook, projection_cap=None)

    def clear_layer_ablation(self, layer: int, *, hook: str = HOOK_DEFAULT) -> None:
        """Ablate nothing at a layer any more."""
        self._change(layer, hook, ablation=None)

    def clear_all_vectors(self) -> None:
        """Add nothing at any layer any more; caps and ablations stay."""
        for site, _ in list(self._spec.sites()):
            self.clear_layer_vector(site.layer, hook=site.hook)

    def clear_all(self) -> None:
        """Steer by nothing any more."""
        self._spec = SteeringSpec()

    def export_steering_spec(self) -> SteeringSpec:
        """Return what steers; later changes do not change it."""
        return self._spec

    def apply_steering_spec(self, spec: SteeringSpec) -> None:
        """Steer by this and nothing else; raises UsageError when it does not fit the model."""
        self._check(spec.steering())
        self._spec = spec

    @contextmanager
    def steering(self, spec: SteeringSpec) -> Iterator[Self]:
        """Steer by a specification for as long as a block runs, then by what held before, however the block ends."""
        before = self._spec
        self.apply_steering_spec(spec)
        try:
            yield self
        finally:
            self._spec = before

    # what is kept

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write what steers, and the model's name, to a directory that `load` reads; the weights are not written."""
        save_spec(directory, self.info.name, self._spec)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], **arguments: Any) -> Self:
        """Return the model that a directory names, steered as it says.

        arguments: further ones for this class.
        """
        name, spec = load_spec(directory)
        model = cls(name, **arguments)  # type: ignore[arg-type]  # a back end takes a name
        try:
            model.apply_steering_spec(spec)
        except BaseException:
            model.close()
            raise
        return model

    # what is answered

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
        """Return an answer to each prompt, one for a single prompt.

        steering: what steers these besides, at phases and positions too.
        """
        sampling = Sampling(max_new_tokens, temperature, top_p, seed, ignore_eos)
        return [done.text for done in self.complete(prompts, sampling, steering=steering)]

    def complete(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | None = None, *, steering: Steering | None = None
    ) -> list[Completion]:
        """Return an answer to each prompt with its tokens.

        steering: what steers these besides.
        """
        chosen = sampling or Sampling()
        return self.run([Job(p, self.steered(steering), chosen) for p in _prompts(prompts)])

    def logprobs(
        self, prompts: Prompt | Sequence[Prompt], *, steering: Steering | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the natural log probabilities of the token behind each prompt, `[prompts, vocabulary]` float32."""
        return self._logprobs(_prompts(prompts), self.steered(steering))

    def last_rows(
        self, prompts: Prompt | Sequence[Prompt], sites: Sequence[Site], *, steering: Steering | None = None
    ) -> Rows:
        """Return the stream at each prompt's last token, `[prompts, hidden_size]` float32 for each site.

        A row is the stream as it comes to the site, before what steers it there.
        """
        for site in sites:
            self._check_site(site)
        return self._last_rows(_prompts(prompts), sites, self.steered(steering))

    def steered(self, steering: Steering | None = None) -> Steering:
        """Return all that steers: the specification, and what is given; raises UsageError when that does not fit."""
        if steering is None:
            return self._spec.steering()
        self._check(steering)
        return join(self._spec.steering(), steering)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what the model holds; it is not used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # what a back end does

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> list[Completion]:
        """Return the answers to jobs, in order, each steered by its own steering alone."""

    @abstractmethod
    def _logprobs(self, prompts: Sequence[Prompt], steering: Steering) -> npt.NDArray[np.float32]: ...

    @abstractmethod
    def _last_rows(self, prompts: Sequence[Prompt], sites: Sequence[Site], steering: Steering) -> Rows: ...

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
    given: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
    for index, prompt in enumerate(given):
        if not prompt or not (isinstance(prompt, str) or _is_ids(prompt)):
            raise UsageError(explain(f"prompts.{index}", got=prompt, expected="a text or a list of token ids"))
    return given


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(token, int) for token in prompt)
