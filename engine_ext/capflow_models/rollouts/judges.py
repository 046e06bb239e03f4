"""Judges of rollouts: each gives an answer a score, or several.

| judge | score |
|---|---|
| `regex:PATTERN` | 1 where Python's `re.search` finds the pattern in the answer's text, else 0 |
| `perplexity` | exp of the mean negative log probability of the answer's tokens, given the prompt, without steering |
| `probe:FILE` | the score of the rows at the answer's tokens, when the model reads prompt and answer without steering |
| `function:MODULE:FUNCTION` | `function(prompt, text)` of a user, a number |

A probe's scores are pooled as its file says; `token` means the mean here. A file of several probes gives a score for
each, `NAME.PROBE`. A judge reads the text, not the tokens that were generated: an answer has the same scores whenever
it is judged. Its tokens are those of prompt and text together that follow the tokens of the prompt. An answer without
tokens, and one that fills the model's context, has no score from a probe, and no perplexity.
"""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow.plugins.function import function_named
from capflow.probes.kinds import load_probe
from capflow.probes.probe import Scorer
from capflow_models.model import SteerableModel
from capflow_models.spec import SteeringSpec
from capflow_models.sweep.origin import digest_of

KINDS = ("probe", "regex", "perplexity", "function")

_FORM = re.compile(rf"(?:([A-Za-z_][\w-]*)=)?({'|'.join(KINDS)})(?::(.*))?", re.DOTALL)
_EXPECTED = "[NAME=]probe:FILE, regex:PATTERN, perplexity or function:MODULE:FUNCTION"

JudgedText = tuple[str, str]
"""A prompt, and the text of its answer."""

JudgeScores = dict[str, float | None]
"""Scores by name; None where there is none."""


class Judge(ABC):
    """A judge.

    name: that of its score, or the beginning of its scores' names.
    digest: a text that differs between judges that may score differently.
    """

    name: str
    digest: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of its scores."""
        return (self.name,)

    @property
    def site(self) -> Site | None:
        """The site whose rows it reads; None if it reads none."""
        return None

    @property
    def directions(self) -> list[tuple[str, Site, int]]:
        """What must fit the model: for each what errors call it, its site, and how many numbers it has."""
        return []

    @property
    def reads(self) -> bool:
        """Whether a model must read the answers."""
        return False

    # Not abstract: most judges fit every model.
    def check(self, model: SteerableModel) -> None:  # noqa: B027
        """Raise UsageError unless it can judge the answers of this model."""

    @abstractmethod
    def scores(self, model: SteerableModel | None, texts: Sequence[JudgedText]) -> list[JudgeScores]:
        """Return the scores of each answer. `model` is there if the judge `reads`."""


class RegexJudge(Judge):
    """Whether a pattern is in an answer. Raises UsageError for an invalid pattern."""

    def __init__(self, name: str, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as e:
            got = f"{pattern}: {e}"
            raise UsageError(explain("--judge regex", got=got, expected="a regular expression of Python's re")) from e
        self.name, self.digest = name, _digest("regex", pattern.encode())

    def scores(self, model: SteerableModel | None, texts: Sequence[JudgedText]) -> list[JudgeScores]:  # noqa: ARG002
        """Return 1 for each answer in which the pattern is, else 0."""
        return [{self.name: float(self._pattern.search(text) is not None)} for _, text in texts]


class FunctionJudge(Judge):
    """A function of a user. Raises UsageError if there is none of this name."""

    def __init__(self, name: str, function: str) -> None:
        self._function: Callable[..., Any] = function_named(function, "--judge function")
        self.name, self.digest = (
            name,
            _digest("function", function.encode(), digest_of(function, self._function).encode()),
        )

    def scores(self, model: SteerableModel | None, texts: Sequence[JudgedText]) -> list[JudgeScores]:  # noqa: ARG002
        """Return the function's number for each answer; None for NaN. Raises CapflowError if the function fails."""
        return [{self.name: self._score(prompt, text)} for prompt, text in texts]

    def _score(self, prompt: str, text: str) -> float | None:
        try:
            score = float(self._function(prompt, text))
        except Exception as e:
            got = f"{type(e).__name__}: {e}, for the answer {text!r}"
            raise CapflowError(explain(f"judge {self.name}", got=got, expected="a number for (prompt, text)")) from e
        return score if math.isfinite(score) else None


class PerplexityJudge(Judge):
    """The perplexity of an answer."""

    def __init__(self, name: str) -> None:
        self.name, self.digest = name, _digest("perplexity", b"")

    @property
    def reads(self) -> bool:
        """True."""
        return True

    def scores(self, model: SteerableModel | None, texts: Sequence[JudgedText]) -> list[JudgeScores]:
        """Return the perplexity of each answer, at least 1."""
        assert model is not None
        ids, starts, read = _readable(model, texts)
        scores: list[JudgeScores] = [{self.name: None} for _ in texts]
        if read:
            with model.steering(SteeringSpec()):
                logprobs = model.token_logprobs([ids[number] for number in read])
            for number, each in zip(read, logprobs, strict=True):
                loss = -float(each[starts[number] - 1 :].astype(np.float64).mean())
                scores[number] = {self.name: math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else None}
        return scores


class ProbeJudge(Judge):
    """The scores of probes. Raises UsageError if the file is none of a probe."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self._probe = name, load_probe(path)
        probe = self._probe
        parts = [part for index in range(len(probe.names)) for part in probe.parts(index)]
        self.digest = _digest("probe", f"{probe.site} {probe.pool} {probe.names}".encode(), *parts)

    @property
    def columns(self) -> tuple[str, ...]:
        """The judge's name; of several probes, that and the probe's."""
        names = self._probe.names
        return (self.name,) if len(names) == 1 else tuple(f"{self.name}.{each}" for each in names)

    @property
    def site(self) -> Site:
        """The probes' site."""
        return self._probe.site

    @property
    def directions(self) -> list[tuple[str, Site, int]]:
        """The probes."""
        return [(f"--judge {self.name}, {self._probe.where}", self.site, self._probe.hidden_size)]

    @property
    def reads(self) -> bool:
        """True."""
        return True

    def check(self, model: SteerableModel) -> None:
        """Raise UsageError unless the probes fit the model."""
        self._probe.check(model.info.sites, model.info.width_of(self.site))

    def scores(self, model: SteerableModel | None, texts: Sequence[JudgedText]) -> list[JudgeScores]:
        """Return the pooled scores of each answer."""
        assert model is not None
        ids, starts, read = _readable(model, texts)
        scores: list[JudgeScores] = [dict.fromkeys(self.columns) for _ in texts]
        if read:
            with model.steering(SteeringSpec()):
                every = model.prompt_rows([ids[number] for number in read], [self.site])
            for number, rows in zip(read, every, strict=True):
                pooled = _pooled(self._probe, self._probe.scores(rows[self.site][starts[number] :]))
                scores[number] = {
                    column: score if math.isfinite(score) else None
                    for column, score in zip(self.columns, pooled, strict=True)
                }
        return scores


def _pooled(probe: Scorer, scores: Any) -> list[float]:
    """Return one score for each probe, of scores `[n, k]`."""
    wide = scores.astype(np.float64)
    pooled = {"last": lambda: wide[-1], "max": lambda: wide.max(0)}.get(probe.pool, lambda: wide.mean(0))()
    return [float(score) for score in pooled]


def _readable(model: SteerableModel, texts: Sequence[JudgedText]) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the tokens of each prompt and answer, the place of the answer's first, and the numbers of those to read.

    An answer without tokens is not read, nor one that leaves no room for the token that vLLM makes after it.
    """
    placed = [answer_tokens(model, *each) for each in texts]
    bound = math.inf if model.length_max is None else model.length_max
    read = [number for number, (tokens, start) in enumerate(placed) if start < len(tokens) < bound]
    return [tokens for tokens, _ in placed], [start for _, start in placed], read


def answer_tokens(model: SteerableModel, prompt: str, text: str) -> tuple[list[int], int]:
    """Return the tokens of prompt and answer, and the place of the answer's first: that where the prompt's end."""
    before, whole = model.token_ids(prompt), model.token_ids(prompt + text)
    start = next(
        (n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(map(len, (before, whole)))
    )
    return whole, max(start, 1)


def _digest(kind: str, *parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (kind.encode(), *parts):
        digest.update(b"%d " % len(part) + part)
    return f"{kind} {digest.hexdigest()}"


def parse_judges(texts: Sequence[str]) -> list[Judge]:
    """Return the judges that the values of `--judge` name.

    Raises UsageError for a value of another form, a file or function that cannot be loaded, and for a name that two
    scores have.
    """
    judges = [_parsed(text) for text in texts]
    for name, count in Counter(name for judge in judges for name in {judge.name, *judge.columns}).items():
        if count > 1:
            raise UsageError(
                explain("--judge", got=f"{name} twice", expected="each name once", do="give names: NAME=…")
            )
    return judges


def _parsed(text: str) -> Judge:
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(explain("--judge", got=text, expected=_EXPECTED))
    name, kind, argument = match[1] or match[2], match[2], match[3]
    if (kind == "perplexity") != (argument is None) or argument == "":
        raise UsageError(explain("--judge", got=text, expected=_EXPECTED))
    if kind == "perplexity":
        return PerplexityJudge(name)
    makers: dict[str, Callable[[str, str], Judge]] = {
        "probe": ProbeJudge,
        "regex": RegexJudge,
        "function": FunctionJudge,
    }
    return makers[kind](name, argument)
