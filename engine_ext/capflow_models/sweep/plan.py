"""The runs of a sweep: which change is made to which prompt, at which site and position."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.capture.site import HOOKS, Site, hook_named
from capflow.capture.spec import layers_of
from capflow.errors import UsageError, explain
from capflow_models.sweep.items import items_of
from capflow_models.sweep.origin import described
from capflow_models.sweep.pairs import TokenPair
from capflow_models.sweep.parts import Frozen, Path, RowPart

DIRECTIONS = ("denoise", "noise")
"""`denoise` puts rows of the clean run into the corrupted one, `noise` rows of the corrupted run into the clean one."""

ABLATIONS = ("zero", "mean", "resample")
"""What comes into the clean run: zeros, the site's mean row over all prompts, or the corrupted run's row.

They count as directions, too.
"""

BASES = {"denoise": "corrupted", "noise": "clean", "zero": "clean", "mean": "clean", "resample": "clean"}
"""The prompt that a direction changes."""

DONORS = {"denoise": "clean", "noise": "corrupted", "resample": "corrupted"}
"""The prompt whose rows a direction puts in. The other directions put in rows of no prompt of the pair."""

BASELINES = ("clean", "corrupted")
"""The unchanged runs."""

TOGETHER = -1
"""In the place of a position: all positions of the prompt, changed in one run."""

_RANGE = re.compile(r"(\d{1,7})-(\d{1,7})")
_POSITIONS = "all, changed, last, together, positions such as 3, 2-5 or -1, or several of these separated by commas"


class RunKey(NamedTuple):
    """One run. A baseline has its name as the direction, no site and position -1.

    site: as `HOOK:LAYER`, or with entries of the row as `HOOK:LAYER[3]` or `HOOK:LAYER[0-15]`.
    position: `TOGETHER` if all positions are changed at once.
    """

    pair: str
    direction: str
    site: str = ""
    position: int = -1


class SweptPlaces(NamedTuple):
    """Hooks at chosen layers, or single sites.

    hooks: each once, those of the sites too.
    sites: empty where whole hooks are named.
    layers: as in a capture spec.
    where: the names of the two options.
    """

    hooks: list[str]
    sites: list[Site]
    layers: Any
    where: tuple[str, str]

    @classmethod
    def parse(
        cls, value: str | Sequence[str], layers: Any = "all", where: tuple[str, str] = ("--hooks", "--layers")
    ) -> SweptPlaces:
        """Return the places that a comma-separated text or a list names. Raises UsageError for another name.

        value: hooks; or sites, which may have names of TransformerLens or nnsight.
        layers: of hooks. Sites have their own.
        """
        expected = f"hooks, of {', '.join(HOOKS)}; or sites, such as heads:3"
        named: dict[str | Site, None] = {}
        for name in items_of(value, where[0], expected):
            hook = hook_named(name)
            try:
                named[hook or Site.parse(name)] = None
            except UsageError:
                raise UsageError(explain(where[0], got=name, expected=expected)) from None
        sites = [place for place in named if isinstance(place, Site)]
        if sites and len(sites) < len(named):
            raise UsageError(explain(where[0], got="hooks and sites", expected="hooks, or sites"))
        if sites and layers != "all":
            raise UsageError(explain(where[1], got=layers, expected=f"all, as {where[0]} names sites"))
        hooks = dict.fromkeys(place.hook if isinstance(place, Site) else place for place in named)
        return cls(list(hooks), sites, layers, where)

    @property
    def strict(self) -> bool:
        """Whether a site that the model lacks is refused; else it is left out."""
        return bool(self.sites) or self.layers != "all"

    def of(self, count: int) -> list[Site]:
        """Return the sites of a model. The hook `final` has one, at the last layer, whatever the layers.

        count: the number of layers of the model.

        Raises UsageError for a layer that the model does not have.
        """
        for site in self.sites:
            last = f"final:{count - 1}" if site.hook == "final" else f"a layer of 0..{count - 1}"
            if site.layer >= count or (site.hook == "final" and site.layer < count - 1):
                raise UsageError(explain(self.where[0], got=str(site), expected=last))
        if self.sites:
            return list(self.sites)
        chosen = layers_of(self.layers, count, self.where[1])
        return [Site(layer, hook) for hook in self.hooks for layer in ([count - 1] if hook == "final" else chosen)]


class PatchPositions(NamedTuple):
    """Which positions of each prompt are changed.

    items: as the user wrote them.
    """

    items: tuple[str, ...]

    @classmethod
    def parse(cls, value: Any, where: str = "--positions") -> PatchPositions:
        """Return the places of a comma-separated text, of a number or of a list of both. Raises UsageError."""
        items = tuple(items_of(value, where, _POSITIONS))
        for item in items:
            number = re.fullmatch(r"-?\d{1,7}", item)
            bounds = _RANGE.fullmatch(item)
            if (bounds and int(bounds[1]) > int(bounds[2])) or not (
                item in ("all", "changed", "last", "together") or number or bounds
            ):
                raise UsageError(explain(where, got=item or repr(value), expected=_POSITIONS))
        return cls(items)

    def of(self, pair: TokenPair, where: str = "--positions") -> list[int]:
        """Return the positions in a pair, ascending; `TOGETHER` stands for all at once and comes first.

        Raises UsageError for a position outside of the prompts, and for more than a run may change at once.
        """
        length = len(pair.clean)
        positions: set[int] = set()
        for item in self.items:
            if item == "all":
                positions.update(range(length))
            elif item == "changed":
                positions.update(pair.changed)
            elif item == "last":
                positions.add(length - 1)
            elif item == "together":
                if length > limits.POSITIONS_LISTED_MAX:
                    expected = f"at most {limits.POSITIONS_LISTED_MAX} for together"
                    raise UsageError(explain(where, got=f"{length} tokens in pair {pair.id}", expected=expected))
                positions.add(TOGETHER)
            else:
                bounds = _RANGE.fullmatch(item)
                first, stop = (int(bounds[1]), int(bounds[2])) if bounds else (int(item), int(item))
                if not -length <= first <= stop < length:
                    expected = f"{-length}..{length - 1}, as pair {pair.id} has {length} tokens"
                    raise UsageError(explain(where, got=f"position {item}", expected=expected))
                positions.update(position % length for position in range(first, stop + 1))
        return sorted(positions)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    pairs: of prompts, in tokens.
    parts: what is changed: sites, or entries of their rows.
    positions: of each pair.
    functions: the names of the user's metrics, each with a digest of its module's file.
    engine: arguments of `capflow.LLM`.
    receivers: where each part's change is received on the direct path; empty if the parts act on everything.
    frozen: what is frozen behind the senders of paths; None without paths.
    origin: what else the values depend on: the identity of the model and versions, by name.
    """

    model: str
    pairs: Sequence[TokenPair]
    parts: Sequence[RowPart]
    positions: Sequence[Sequence[int]]
    directions: Sequence[str]
    functions: Mapping[str, str]
    engine: Mapping[str, Any]
    origin: Mapping[str, str] = field(default_factory=dict)
    receivers: Sequence[RowPart] = ()
    frozen: Frozen | None = None

    @property
    def sites(self) -> list[Site]:
        """The sites of the parts, each once."""
        return list(dict.fromkeys(part.site for part in self.parts))

    def keys(self, number: int) -> Iterator[RunKey]:
        """Yield the runs of a pair: its baselines first."""
        name = self.pairs[number].id
        for baseline in BASELINES:
            yield RunKey(name, baseline)
        for direction in self.directions:
            for place in self.places:
                for position in self.positions[number]:
                    yield RunKey(name, direction, place, position)

    @functools.cached_property
    def places(self) -> list[str]:
        """What single runs change: the names of parts, or those of paths to receivers behind them."""
        if not self.receivers:
            return list(map(str, self.parts))
        return [
            str(Path(part, receiver))
            for part in self.parts
            for receiver in self.receivers
            if part.site.layer < receiver.site.layer + (receiver.site.hook in ("post_block", "final"))
        ]

    @property
    def run_count(self) -> int:
        """The number of runs, baselines included."""
        changed = sum(map(len, self.positions)) * len(self.places) * len(self.directions)
        return changed + len(BASELINES) * len(self.pairs)

    @property
    def token_count(self) -> int:
        """The number of prompt tokens of all runs, as far as no cache has them."""
        each = len(self.places) * len(self.directions)
        return sum(
            len(pair.clean) * (each * len(at) + len(BASELINES))
            for pair, at in zip(self.pairs, self.positions, strict=True)
        )

    def settings(self) -> dict[str, Any]:
        """Return what the values of runs depend on, besides their keys; each pair by a digest of its tokens.

        `mean` is a digest of all pairs, as a mean row is one over all of their prompts; None if there is no such run.
        """
        digests = {pair.id: _digest(pair.clean, pair.corrupted, pair.answer, pair.wrong_answer) for pair in self.pairs}
        return {
            "mean": _digest(*digests.values()) if "mean" in self.directions else None,
            "model": self.model,
            "origin": dict(self.origin),
            "engine": {name: described(value) for name, value in sorted(self.engine.items())},
            "functions": dict(sorted(self.functions.items())),
            "pairs": digests,
        }


def check_directions(
    value: str | Collection[str], where: str = "--direction", allowed: Sequence[str] = DIRECTIONS
) -> list[str]:
    """Return the directions that a name means: `both` the first two of the allowed ones, `all` each of them.

    Raises UsageError for another name.
    """
    groups = {"both": allowed[:2]} | ({"all": allowed} if len(allowed) > 2 else {})
    expected = f"one of {', '.join([*allowed, *groups])}"
    names = items_of(value, where, expected)
    if len(names) == 1 and names[0] in groups:
        return list(groups[names[0]])
    for name in names:
        if name not in allowed:
            raise UsageError(explain(where, got=name, expected=expected))
    return list(dict.fromkeys(names))


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def batches(keys: Iterable[RunKey], size: int) -> Iterator[list[RunKey]]:
    """Yield runs in lists of `size`."""
    batch: list[RunKey] = []
    for key in keys:
        batch.append(key)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
