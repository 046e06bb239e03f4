"""The report of `capflow doctor --steering`: measurements of steering, and what they mean.

A difference is the largest |Δ logprob| of any of the 20 likeliest tokens, in nats, over the tokens that two answers
have in common and the one after them. A check fails by numbers that are in the report. The cost never fails a check.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import msgspec

GOALS = {"idle": 0.98, "steered": 0.95}
"""The goals, as fractions of plain vLLM's tokens a second.

`idle`: armed, with no request steered. `steered`: every request steered at every tapped site.
"""

TURNS_MIN = 4
"""With fewer turns there is no verdict on a goal."""

RELATIVE_NORM = 0.5
"""The norm of the added vectors, relative to the median norm of the rows."""

_DO = "do not rely on steering here; --enforce-eager says whether torch.compile is to blame"


class Bounds(msgspec.Struct, frozen=True):
    """The largest allowed difference between two answers that should be equal.

    logprob: in nats.
    relative: as a fraction of the difference that steering makes.
    """

    logprob: float
    relative: float

    @classmethod
    def of(cls, dtype: str) -> Bounds:
        """Return the bounds for a model's dtype."""
        return cls(1e-3, 0.01) if dtype == "float32" else cls(0.02, 0.25)


class Fired(msgspec.Struct, frozen=True):
    """The effect of a vector that was added at one site.

    noise: the difference between repetitions of the request without the vector.
    moved, decode_moved: the change of the next token's logprobs, with the vector added to the prompt, and to the first
        generated token only.
    changed_before: the largest relative change of the rows captured at the site (capture precedes steering there) and
        in the layers below.
    patched_apart: the difference to an answer in which the captured rows, with the vector added by hand, were patched
        in; relative to `moved`.
    """

    site: str
    noise: float
    moved: float
    decode_moved: float
    changed_before: float
    patched_apart: float

    def failures(self, bounds: Bounds) -> Iterator[str]:
        """Yield a message for each failure."""
        least = 5 * self.noise + 1e-4
        for tokens, moved in (("the prompt", self.moved), ("generated tokens", self.decode_moved)):
            if not moved > least:
                yield (
                    f"{self.site}: a vector added to {tokens} changes nothing: {_nats(moved)}, "
                    f"the noise is {_nats(self.noise)}; {_DO}"
                )
        if not self.changed_before <= bounds.relative:
            yield f"{self.site}: a vector added there changes rows before it by {self.changed_before:.1e}; {_DO}"
        if not self.patched_apart <= bounds.relative:
            yield (
                f"{self.site}: adding a vector and adding it to the captured rows by hand give different answers: "
                f"{self.patched_apart:.1e} apart, expected {bounds.relative:g} at most; {_DO}"
            )


class Apart(msgspec.Struct, frozen=True):
    """The difference between two runs of the same requests.

    logprob: in nats.
    equal: the number of generated tokens before the first that differs.
    """

    logprob: float
    equal: int
    tokens: int


class Mates(msgspec.Struct, frozen=True):
    """The effect of steered requests on plain requests in the same batch. Each run is compared with the plain batch.

    requests: the number of plain requests.
    noise: the plain batch, run again.
    beside: the batch with steered mates.
    after: the plain batch, run once more after it.
    alone: each request by itself.
    vllm: the plain batch in vLLM without capflow.
    mates: how far each kind of steered mate moved, in nats.
    """

    requests: int
    noise: Apart
    beside: Apart
    after: Apart
    alone: Apart
    vllm: Apart
    mates: dict[str, float]

    def failures(self, dtype: str) -> Iterator[str]:
        """Yield a message for each failure.

        Batches of another shape, and vLLM without capflow, are checked in float32 only.
        """
        bound = Bounds.of(dtype).logprob
        allowed = max(2 * self.noise.logprob, bound)
        for kind, moved in self.mates.items():
            if not moved > allowed:
                yield f"mates with {kind}: steering them changes nothing, {_nats(moved)}; {_DO}"
        runs = [
            ("beside steered requests", self.beside, allowed),
            ("after steered requests", self.after, allowed),
        ]
        if dtype == "float32":
            runs += [("sent alone", self.alone, bound), ("in vLLM without capflow", self.vllm, bound)]
        for run, apart, most in runs:
            if not apart.logprob <= most:
                yield (
                    f"plain requests {run} answer differently: {_nats(apart.logprob)}, "
                    f"expected {most:.1e} at most; {_DO}"
                )


class AppliedCheck(msgspec.Struct, frozen=True):
    """The report of applied steering in the answer to a request that was steered at every site.

    prefill, decode: the number of operations at each site.
    expected: the sites; one operation is expected at each.
    """

    key: str
    prefill: dict[str, int]
    decode: dict[str, int]
    expected: list[str]

    def failures(self) -> Iterator[str]:
        """Yield a message for each failure."""
        wanted = dict.fromkeys(self.expected, 1)
        if self.prefill != wanted or self.decode != wanted:
            sites = f"{len(self.prefill)} and {len(self.decode)} sites"
            yield f"the applied set names {sites}, expected {len(wanted)}; {_DO}"


class Cost(msgspec.Struct, frozen=True):
    """The durations of the turns in seconds. The modes `plain`, `idle` and `steered` take turns.

    tokens: the number of tokens generated in each turn.
    seconds: the durations of each mode.
    """

    tokens: int
    seconds: dict[str, list[float]]

    @property
    def turns(self) -> int:
        """The number of turns of each mode."""
        return len(self.seconds["plain"])

    def ratios(self, mode: str) -> list[float]:
        """Return for each turn the fraction of plain vLLM's tokens a second."""
        return [plain / one for plain, one in zip(self.seconds["plain"], self.seconds[mode], strict=True)]

    def ratio(self, mode: str) -> float:
        """Return the fraction of plain vLLM's tokens a second, by medians."""
        return statistics.median(self.seconds["plain"]) / statistics.median(self.seconds[mode])

    def verdict(self, mode: str) -> str:
        """Return `met` or `missed` if the middle half of the turns agree, else why there is no verdict."""
        if self.turns < TURNS_MIN:
            return "too few turns to tell"
        low, _, high = statistics.quantiles(self.ratios(mode), n=4)
        if low >= GOALS[mode]:
            return "met"
        return "missed" if high < GOALS[mode] else "too noisy to tell"


class Report(msgspec.Struct, frozen=True):
    """The whole report.

    compiled: whether the model ran with torch.compile.
    cost: the durations; None if they were not measured.
    """

    model: str
    dtype: str
    compiled: bool
    taps: int
    fired: list[Fired]
    mates: Mates
    applied: AppliedCheck
    cost: Cost | None

    def failures(self) -> list[str]:
        """Return a message for each failure, with what to do; empty if steering works."""
        bounds = Bounds.of(self.dtype)
        checks: Iterable[Iterator[str]] = (
            *(one.failures(bounds) for one in self.fired),
            self.mates.failures(self.dtype),
            self.applied.failures(),
        )
        missing = [] if self.fired else ["no site can be steered; see `capflow sites MODEL`"]
        return missing + [line for lines in checks for line in lines]


def _nats(value: float) -> str:
    return f"largest |Δ logprob| {value:.1e}"
