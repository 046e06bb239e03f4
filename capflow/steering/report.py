"""What a check of steering found, and what it means: the report of `capflow doctor --steering`.

Differences are the largest |Δ logprob| of any of the 20 likeliest tokens, in nats, over the tokens that answers have in common
and the one behind them. A check fails by numbers that are in the report; the cost never fails one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import msgspec

GOALS = {"idle": 0.98, "steered": 0.95}
"""What is left of plain vLLM's tokens a second: armed and idle; every request steered at every tapped site."""

TURNS_MIN = 4
"""With fewer turns, nothing is said of a goal."""

RELATIVE_NORM = 0.5
"""Of the vectors that are added: to the median norm of the rows that are there."""

_DO = "do not rely on steering here; --enforce-eager says whether torch.compile is to blame"


class Bounds(msgspec.Struct, frozen=True):
    """What two answers may be apart that ought to be the same.

    logprob: in nats.
    relative: a difference, to that which steering makes.
    """

    logprob: float
    relative: float

    @classmethod
    def of(cls, dtype: str) -> Bounds:
        """Return the bounds of a model's dtype."""
        return cls(1e-3, 0.01) if dtype == "float32" else cls(0.02, 0.25)


class Fired(msgspec.Struct, frozen=True):
    """What a vector did that was added at one site.

    noise: the same request without it, asked several times.
    moved, decode_moved: the next token's logprobs, the vector added to the prompt, and to the first generated token
        alone.
    changed_before: the largest relative change of the rows that were captured at the site, before the vector is added
        there, and in the layers below.
    patched_apart: how far an answer is from it in which the rows that were captured at the site, with the vector added
        by hand, were put there; relative to `moved`.
    """

    site: str
    noise: float
    moved: float
    decode_moved: float
    changed_before: float
    patched_apart: float

    def failures(self, bounds: Bounds) -> Iterator[str]:
        """Yield what is wrong."""
        least = 5 * self.noise + 1e-4
        for what, moved in (("the prompt", self.moved), ("generated tokens", self.decode_moved)):
            if not moved > least:
                yield f"{self.site}: a vector added to {what} changes nothing: {_nats(moved)}, the noise is {_nats(self.noise)}; {_DO}"
        if not self.changed_before <= bounds.relative:
            yield f"{self.site}: a vector added there changes rows before it by {self.changed_before:.1e}; {_DO}"
        if not self.patched_apart <= bounds.relative:
            yield (
                f"{self.site}: adding a vector is not what adding it to the captured rows comes to: {self.patched_apart:.1e} apart, "
                f"expected {bounds.relative:g} at most; {_DO}"
            )


class Apart(msgspec.Struct, frozen=True):
    """How far two runs of the same requests are apart.

    equal: of `tokens` generated tokens, before the first that differs.
    """

    logprob: float
    equal: int
    tokens: int


class Mates(msgspec.Struct, frozen=True):
    """What became of plain requests beside steered ones, against the same batch with nothing steered.

    noise: that batch, run again.
    beside: the batch with steered mates.
    after: the plain batch, run once more behind it.
    alone: each request by itself.
    vllm: the plain batch in vLLM without capflow.
    mates: how far each kind of steered mate moved.
    """

    requests: int
    noise: Apart
    beside: Apart
    after: Apart
    alone: Apart
    vllm: Apart
    mates: dict[str, float]

    def failures(self, dtype: str) -> Iterator[str]:
        """Yield what is wrong. Batches of another shape, and vLLM without capflow, are held against a bound in float32 alone."""
        bound = Bounds.of(dtype).logprob
        allowed = max(2 * self.noise.logprob, bound)
        for kind, moved in self.mates.items():
            if not moved > allowed:
                yield f"mates with {kind}: steering them changes nothing, {_nats(moved)}; {_DO}"
        for what, apart in (("beside steered requests", self.beside), ("after steered requests", self.after)):
            if not apart.logprob <= allowed:
                yield f"plain requests {what} answer differently: {_nats(apart.logprob)}, expected {allowed:.1e} at most; {_DO}"
        if dtype != "float32":
            return
        for what, apart in (("alone and in a batch", self.alone), ("with capflow and in plain vLLM", self.vllm)):
            if not apart.logprob <= bound:
                yield f"plain requests answer differently {what}: {_nats(apart.logprob)}, expected {bound:g} at most; {_DO}"


class AppliedCheck(msgspec.Struct, frozen=True):
    """What the answer to a request says of what steered it, which was steered at every site.

    expected: one operation at each.
    """

    key: str
    prefill: dict[str, int]
    decode: dict[str, int]
    expected: list[str]

    def failures(self) -> Iterator[str]:
        """Yield what is wrong."""
        wanted = dict.fromkeys(self.expected, 1)
        if self.prefill != wanted or self.decode != wanted:
            yield f"the applied set names {len(self.prefill)} and {len(self.decode)} sites, expected {len(wanted)}; {_DO}"


class Cost(msgspec.Struct, frozen=True):
    """How long the turns took, in seconds, `plain`, `idle` and `steered` after each other.

    tokens: generated in each.
    """

    tokens: int
    seconds: dict[str, list[float]]

    @property
    def turns(self) -> int:
        """How many of each there are."""
        return len(self.seconds["plain"])

    def ratios(self, mode: str) -> list[float]:
        """Return for each turn what is left of plain vLLM's tokens a second."""
        return [plain / one for plain, one in zip(self.seconds["plain"], self.seconds[mode], strict=True)]

    def ratio(self, mode: str) -> float:
        """Return what is left of plain vLLM's tokens a second, by medians."""
        return statistics.median(self.seconds["plain"]) / statistics.median(self.seconds[mode])

    def verdict(self, mode: str) -> str:
        """Return whether the goal is met: `met` or `missed` when the middle half of the turns agree, else why it cannot be told."""
        if self.turns < TURNS_MIN:
            return "too few turns to tell"
        low, _, high = statistics.quantiles(self.ratios(mode), n=4)
        if low >= GOALS[mode]:
            return "met"
        return "missed" if high < GOALS[mode] else "too noisy to tell"


class Report(msgspec.Struct, frozen=True):
    """All of it.

    dtype: the model's, as loaded.
    taps: how many.
    cost: None when it was left out.
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
        """Return what is wrong, and what to do; nothing when steering works."""
        bounds = Bounds.of(self.dtype)
        found: Iterable[Iterator[str]] = (
            *(one.failures(bounds) for one in self.fired),
            self.mates.failures(self.dtype),
            self.applied.failures(),
        )
        missing = [] if self.fired else ["no site can be steered; see `capflow sites MODEL`"]
        return missing + [line for lines in found for line in lines]


def _nats(value: float) -> str:
    return f"largest |Δ logprob| {value:.1e}"
