"""What is measured of a run: numbers of the distribution of the next token.

| metric | meaning |
|---|---|
| logit_diff | the answer's logit minus the wrong answer's |
| probability | the answer's probability |
| logprob | its logarithm, in nats |
| kl | KL(clean || run) in nats, over the whole vocabulary |

A metric `module:function` is a user's: `function(logits, answer, wrong_answer)` gets `[vocabulary]` float32 and two
token ids, and returns a number.

*Recovery* is `(value - corrupted) / (clean - corrupted)`: 0 is the corrupted run, 1 the clean one, for each metric and
in both directions (Wang et al. 2023, arXiv:2211.00593; Zhang and Nanda 2024, arXiv:2309.16042).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from capflow.errors import UsageError, explain
from capflow.plugins.function import function_named
from capflow_models.sweep.items import items_of
from capflow_models.sweep.origin import digest_of
from capflow_models.sweep.plan import RunKey


class SweepRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run with what was measured of it.

    logits, logprobs: of the answer and of the wrong answer.
    kl: KL(clean || this) in nats.
    top: the likeliest token.
    values: of the user's functions, by name.
    """

    pair: str
    direction: str
    site: str
    position: int
    logits: tuple[float, float]
    logprobs: tuple[float, float]
    kl: float
    top: int
    values: dict[str, float] = {}

    @property
    def key(self) -> RunKey:
        """The run's place in its plan."""
        return RunKey(self.pair, self.direction, self.site, self.position)


MEANINGS = {
    "logit_diff": "the answer's logit minus the wrong answer's",
    "probability": "the answer's probability",
    "logprob": "the logarithm of the answer's probability, in nats",
    "kl": "KL(clean || run) in nats, over the whole vocabulary",
}
"""The metrics that need no function."""

METRICS_DEFAULT = ("logit_diff", "probability", "kl")

_VALUES: dict[str, Callable[[SweepRun], float]] = {
    "logit_diff": lambda run: run.logits[0] - run.logits[1],
    "probability": lambda run: math.exp(run.logprobs[0]),
    "logprob": lambda run: run.logprobs[0],
    "kl": lambda run: run.kl,
}


def value_of(run: SweepRun, metric: str) -> float:
    """Return the value of a metric."""
    return _VALUES[metric](run) if metric in _VALUES else run.values[metric]


def check_metrics(value: str | Iterable[str], where: str = "--metrics") -> list[str]:
    """Return the metrics that a comma-separated text or a list names, each once.

    Raises UsageError for a name that is neither a metric nor a function's.
    """
    expected = f"one of {', '.join(MEANINGS)}, or module:function"
    names = items_of(value, where, expected)
    for name in names:
        if name not in MEANINGS and ":" not in name:
            raise UsageError(explain(where, got=name, expected=expected))
    return list(dict.fromkeys(names))


def digests(metrics: Sequence[str], where: str = "--metrics") -> dict[str, str]:
    """Return the user's functions among metrics, each with a digest of the file of its module.

    Raises UsageError for one that cannot be imported.
    """
    own = [name for name in metrics if name not in MEANINGS]
    return {name: digest_of(name, function_named(name, where)) for name in own}
