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
from capflow.capture.site import HOOK_DEFAULT, HOOKS, Site, hook_named
from capflow.capture.spec import CaptureSpec, read_layers
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


def read_hooks(value: str | Sequence[str], where: str = "--hooks") -> list[str]:
    """Return the hooks that a comma-separated text or a list names, each once. Raises UsageError for another name."""
    expected = f"hooks, of {', '.join(HOOKS)}"
    hooks: dict[str, None] = {}
    for name in items_of(value, where, expected):
        hook = hook_named(name)
        if hook is None:
            raise UsageError(explain(where, got=name, expected=expected))
        hooks[hook] = None
    return list(hooks)


def sites_of(hooks: Sequence[str], layers: Any, count: int, where: str = "--layers") -> list[Site]:
    """Return the chosen sites of a model, by hook and layer. `final` has one, at the last layer, whatever the layers.

    layers: as in a capture spec.
    count: the number of layers of the model.

    Raises UsageError for a layer that the model does not have.
    """
    spec = CaptureSpec({HOOK_DEFAULT: read_layers(layers, where)})
    every = [Site(layer, HOOK_DEFAULT) for layer in range(count)]
    try:
        chosen = sorted(site.layer for site in spec.resolve(every, num_layers=count, where=where))
    except UsageError as e:
        raise UsageError(str(e).replace(f"{where}.hooks.{HOOK_DEFAULT}", where, 1)) from e
    return [Site(layer, hook) for hook in hooks for layer in ([count - 1] if hook == "final" else chosen)]


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
