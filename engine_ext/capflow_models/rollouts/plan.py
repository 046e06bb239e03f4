"""Rollouts: the answers to every prompt under every vector at every scale, as rows of a file.

The order of the answers is fixed: by prompt, then vector, then scale, then sample. Each row has the settings that made
it. A run that is started again therefore computes the missing answers only, and refuses a file with rows of other
settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.steering.feature import FeatureUse
from capflow_models.backends import Backend
from capflow_models.model import Job, Sampling, SteerableModel
from capflow_models.rollouts.judges import Judge
from capflow_models.runs.lines import LineFile
from capflow_models.spec import LayerSteeringSpec, SteeringSpec, Vector

PLAIN = "none"
"""The name of the vector in rows without steering."""


class RolloutPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of prompts: `{"id": …, "prompt": …}`.

    max_tokens: this prompt's limit, in place of the job's.
    """

    id: str
    prompt: str
    max_tokens: int | None = None


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One row.

    vector: the name of the vector, or of the features.
    seed: the seed of this sample.
    prompt_tokens, tokens: how many tokens the prompt and the answer have.
    settings: a digest of all further settings of the answer.
    scores: of its judges, by name; None where a judge has none.
    judges: a digest of each judge that scored it, by the judge's name.
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
    scores: dict[str, float | None] = {}
    judges: dict[str, str] = {}

    @property
    def key(self) -> tuple[str, str, float, int]:
        """The row's place among the answers: the same as `WantedAnswer.key`."""
        return self.prompt_id, self.vector, self.scale, self.sample


class WantedAnswer(msgspec.Struct, frozen=True):
    """One answer of a plan."""

    prompt: RolloutPrompt
    vector: str
    scale: float
    sample: int

    @property
    def key(self) -> tuple[str, str, float, int]:
        """The answer's place: prompt, vector, scale and sample."""
        return self.prompt.id, self.vector, self.scale, self.sample


class RolloutPlan(msgspec.Struct, frozen=True):
    """The definition of a set of rollouts.

    vectors: `[hidden_size]` float32, by name and site.
    scales: scale 0 means no steering; its answers are computed once for each prompt, with the vector `none`.
    samples: answers for each prompt, vector and scale.
    seed: sample n has the seed `seed + n`.
    sampling: of each answer; its seed is not used.
    arguments: further arguments of the back end.
    relative: whether scales are relative to the stream's norm.
    features: of autoencoders, by name, beside the vectors. A scale multiplies coefficients, and the strengths of what
        is set.
    saes: a digest of the autoencoders; empty without features.
    hooks: those at which they act.
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
    features: Mapping[str, Sequence[FeatureUse]] = {}
    saes: str = ""
    hooks: Sequence[str] = ()

    def items(self, stride: int = 1, offset: int = 0) -> list[WantedAnswer]:
        """Return every `stride`th answer from number `offset` on, in order."""
        return list(self._every())[offset::stride]

    def _every(self) -> Iterator[WantedAnswer]:
        steered = [(name, scale) for name, scale in product((*self.vectors, *self.features), self.scales) if scale]
        plain = [(PLAIN, 0.0)] if 0.0 in self.scales else []
        for prompt, (name, scale), sample in product(self.prompts, [*plain, *steered], range(self.samples)):
            yield WantedAnswer(prompt, name, scale, sample)

    def settings(self, item: WantedAnswer) -> str:
        """Return a digest of the settings of an answer that its row does not have."""
        digest = hashlib.blake2b(digest_size=8)
        tokens = item.prompt.max_tokens or self.sampling.max_new_tokens
        chosen = (self.sampling.temperature, self.sampling.top_p, self.sampling.ignore_eos, tokens)
        digest.update(msgspec.json.encode([chosen, item.prompt.prompt, sorted(map(repr, self.arguments.items()))]))
        for site, vector in sorted(self.vectors.get(item.vector, {}).items()):
            digest.update(str(site).encode() + vector.tobytes() + (b"relative" if self.relative else b""))
        if item.vector in self.features:
            digest.update(msgspec.json.encode([self.saes, self.features[item.vector]]))
        return digest.hexdigest()

    def job(self, item: WantedAnswer) -> Job:
        """Return the job that computes an answer."""
        layers: dict[int | Site, LayerSteeringSpec] = {
            site: LayerSteeringSpec(vector, item.scale, relative=self.relative)
            for site, vector in self.vectors.get(item.vector, {}).items()
        }
        uses = tuple(use.scaled(item.scale) for use in self.features.get(item.vector, ()))
        steering = msgspec.structs.replace(SteeringSpec(layers).steering(), features=uses)
        return Job(item.prompt.prompt, steering, self._sampling(item))

    def _sampling(self, item: WantedAnswer) -> Sampling:
        own = item.prompt.max_tokens or self.sampling.max_new_tokens
        chosen = self.sampling
        return Sampling(own, chosen.temperature, chosen.top_p, self.seed + item.sample, chosen.ignore_eos)

    def row(self, item: WantedAnswer, text: str, prompt_tokens: int, tokens: int) -> Rollout:
        """Return the row of an answer."""
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


def missing(
    plan: RolloutPlan, items: Sequence[WantedAnswer], rows: Iterable[Rollout], where: str
) -> list[WantedAnswer]:
    """Return the answers that have no row yet. Raises UsageError for a row that was made with other settings.

    where: the file's name, for errors.
    """
    by_key = {item.key: item for item in items}
    done = set()
    for row in rows:
        item = by_key.get(row.key)
        if item is None:
            continue
        made = (row.model, row.backend, row.seed, row.settings)
        if made != (plan.model, plan.backend, plan.seed + item.sample, plan.settings(item)):
            place = f"{where}: prompt {row.prompt_id}, vector {row.vector}, scale {row.scale:g}, sample {row.sample}"
            do = "write to another file, or remove this one"
            raise UsageError(explain(place, got="a row with other settings", expected="this run's settings", do=do))
        done.add(row.key)
    return [item for item in items if item.key not in done]


def judged(rows: Sequence[Rollout], judges: Sequence[Judge], model: SteerableModel | None) -> list[Rollout]:
    """Return rows with the scores of those judges that did not score them.

    model: reads the answers, for judges that need it.
    """
    scored = list(rows)
    for judge in judges:
        todo = [number for number, row in enumerate(scored) if judge.name not in row.judges]
        if todo:
            texts = [(scored[number].prompt, scored[number].text) for number in todo]
            for number, scores in zip(todo, judge.scores(model, texts), strict=True):
                row = scored[number]
                scored[number] = msgspec.structs.replace(
                    row, scores=row.scores | scores, judges=row.judges | {judge.name: judge.digest}
                )
    return scored


def check_judges(rows: Iterable[Rollout], judges: Sequence[Judge], where: str) -> None:
    """Raise UsageError for a row that another judge of the same name scored.

    where: the file's name, for errors.
    """
    digests = {judge.name: judge.digest for judge in judges}
    for row in rows:
        for name, digest in row.judges.items():
            if digests.get(name, digest) != digest:
                got = f"scores of another judge {name}, a {digest.partition(' ')[0]}"
                do = "give this one another name, NAME=…, or write to another file"
                raise UsageError(explain(f"{where}: prompt {row.prompt_id}", got=got, expected="this one's", do=do))


def roll_out(
    model: SteerableModel,
    plan: RolloutPlan,
    items: Sequence[WantedAnswer],
    file: LineFile,
    batch: int,
    judges: Sequence[Judge] = (),
) -> Iterator[int]:
    """Compute answers and write their rows, judged, in batches; yield the number of rows after each batch."""
    for start in range(0, len(items), batch):
        chunk = items[start : start + batch]
        answers = model.run([plan.job(item) for item in chunk])
        rows = [
            plan.row(item, answer.text, len(answer.prompt_token_ids), len(answer.token_ids))
            for item, answer in zip(chunk, answers, strict=True)
        ]
        file.add([msgspec.json.encode(row) for row in judged(rows, judges, model)])
        yield len(rows)
