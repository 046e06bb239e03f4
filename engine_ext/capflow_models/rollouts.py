"""Rollouts: the answers to every prompt under every vector at every scale, as rows of a file.

The order of the items is fixed: by prompt, then vector, then scale, then sample. Each row says what made it, so a run that is
started again does what is not there, and refuses to mix with rows that were made otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow_models.backends import Backend
from capflow_models.lines import LineFile
from capflow_models.model import Job, Sampling, SteerableModel
from capflow_models.spec import LayerSteeringSpec, SteeringSpec, Vector

PLAIN = "none"
"""The name of the vector of rows that nothing steered."""


class RolloutPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of prompts: `{"id": …, "prompt": …}`.

    max_tokens: for this one, in place of the job's.
    """

    id: str
    prompt: str
    max_tokens: int | None = None


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row.

    vector: its name.
    settings: a digest of everything else that the answer depends on.
    """

    prompt_id: str
    vector: str
    scale: float
    sample: int
    seed: int
    model: str
    backend: str
    prompt: str
    text: str
    prompt_tokens: int
    tokens: int
    settings: str

    @property
    def item(self) -> tuple[str, str, float, int]:
        """What the row is of."""
        return self.prompt_id, self.vector, self.scale, self.sample


class WantedAnswer(msgspec.Struct, frozen=True):
    """One answer that is wanted."""

    prompt: RolloutPrompt
    vector: str
    scale: float
    sample: int

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What the item is called; its row has the same."""
        return self.prompt.id, self.vector, self.scale, self.sample


class RolloutPlan(msgspec.Struct, frozen=True):
    """What a data set of rollouts is.

    vectors: by name, by site `[hidden_size]` float32.
    sampling: of each answer; sample n is drawn with `seed + n`.
    arguments: of the back end.
    relative: whether scales are of the stream's norm. Scale 0 steers nothing and is done once for a prompt, under the
        name `none`.
    """

    model: str
    backend: Backend
    prompts: Sequence[RolloutPrompt]
    vectors: Mapping[str, Mapping[Site, Vector]]
    scales: Sequence[float]
    samples: int
    seed: int
    sampling: Sampling
    arguments: Mapping[str, Any] = {}
    relative: bool = False

    def items(self, stride: int = 1, offset: int = 0) -> list[WantedAnswer]:
        """Return every `stride`th item from `offset` on, in order."""
        return list(self._every())[offset::stride]

    def _every(self) -> Iterator[WantedAnswer]:
        steered = [(name, scale) for name, scale in product(self.vectors, self.scales) if scale != 0.0]
        plain = [(PLAIN, 0.0)] if 0.0 in self.scales else []
        for prompt, (name, scale), sample in product(self.prompts, [*plain, *steered], range(self.samples)):
            yield WantedAnswer(prompt, name, scale, sample)

    def settings(self, item: WantedAnswer) -> str:
        """Return a digest of what the answer depends on besides what its row says."""
        said = hashlib.blake2b(digest_size=8)
        tokens = item.prompt.max_tokens or self.sampling.max_new_tokens
        chosen = (self.sampling.temperature, self.sampling.top_p, self.sampling.ignore_eos, tokens)
        said.update(msgspec.json.encode([chosen, item.prompt.prompt, sorted(map(repr, self.arguments.items()))]))
        for site, vector in sorted(self.vectors.get(item.vector, {}).items()):
            said.update(str(site).encode() + vector.tobytes() + (b"relative" if self.relative else b""))
        return said.hexdigest()

    def job(self, item: WantedAnswer) -> Job:
        """Return what a model is asked for."""
        layers: dict[int | Site, LayerSteeringSpec] = {
            site: LayerSteeringSpec(vector, item.scale, relative=self.relative)
            for site, vector in self.vectors.get(item.vector, {}).items()
        }
        return Job(item.prompt.prompt, SteeringSpec(layers).steering(), self._sampling(item))

    def _sampling(self, item: WantedAnswer) -> Sampling:
        own = item.prompt.max_tokens or self.sampling.max_new_tokens
        chosen = self.sampling
        return Sampling(own, chosen.temperature, chosen.top_p, self.seed + item.sample, chosen.ignore_eos)

    def row(self, item: WantedAnswer, text: str, prompt_tokens: int, tokens: int) -> Rollout:
        """Return an item's row."""
        return Rollout(
            *item.key,
            seed=self.seed + item.sample,
            model=self.model,
            backend=self.backend,
            prompt=item.prompt.prompt,
            text=text,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            settings=self.settings(item),
        )


def left(plan: RolloutPlan, items: Sequence[WantedAnswer], rows: Iterable[Rollout], where: str) -> list[WantedAnswer]:
    """Return the items that have no row yet; raises UsageError for a row of one that was made otherwise."""
    by_key = {item.key: item for item in items}
    done = set()
    for row in rows:
        item = by_key.get(row.item)
        if item is None:
            continue
        made = (row.model, row.backend, row.seed, row.settings)
        if made != (plan.model, plan.backend, plan.seed + item.sample, plan.settings(item)):
            what = f"{where}: prompt {row.prompt_id}, vector {row.vector}, scale {row.scale:g}, sample {row.sample}"
            do = "write to another file, or remove this one"
            raise UsageError(explain(what, got="a row made otherwise", expected="this run's settings", do=do))
        done.add(row.item)
    return [item for item in items if item.key not in done]


def roll_out(
    model: SteerableModel, plan: RolloutPlan, items: Sequence[WantedAnswer], file: LineFile, batch: int
) -> Iterator[int]:
    """Answer items and write their rows, a batch at a time; yield after each how many rows it wrote."""
    for start in range(0, len(items), batch):
        some = items[start : start + batch]
        answers = model.run([plan.job(item) for item in some])
        rows = [
            plan.row(item, answer.text, len(answer.prompt_token_ids), len(answer.token_ids))
            for item, answer in zip(some, answers, strict=True)
        ]
        file.add([msgspec.json.encode(row) for row in rows])
        yield len(rows)
