"""The tables of a sweep, as Arrow: a row for each patch and metric, their means with intervals, and the pairs.

| table | a row for each |
|---|---|
| patches | pair, direction, site, index, position and metric: the value, those of the unchanged runs, the recovery |
| summary | direction, site, index, place and metric: means over pairs, with bootstrap intervals |
| pairs | pair and metric: prompts, answers, and the values of the two unchanged runs |

`index` is the first of `entries` heads, neurons or experts that were changed; both are NULL for whole rows. `receiver`
is the end of a path, NULL without paths. A *place* is a position, a position from the end, a role of positions, or
`together`: all positions in one run. Positions of one role in a pair are averaged first. The mean recovery is the ratio
of means, `mean(value - corrupted) / mean(clean - corrupted)`: a pair whose two prompts hardly differ does not decide.
Pairs are resampled with replacement, the same way for every cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from capflow_models.experiment.results.statistics import PROMPTS_MIN, draw, interval
from capflow_models.sweep.metrics import SweepRun, value_of
from capflow_models.sweep.pairs import ROLES, TokenPair
from capflow_models.sweep.parts import RowPart
from capflow_models.sweep.plan import TOGETHER, RunKey, SweepPlan

if TYPE_CHECKING:
    import pyarrow as pa

Align = Literal["position", "end", "role"]
ALIGNS: tuple[str, ...] = get_args(Align)
"""How positions of several pairs are joined: by number, by number from the end, or by role."""

RESAMPLES_DEFAULT = 1000
CONFIDENCE_DEFAULT = 0.95

# The resampled values that are held at a time: with 1000 resamples, those of 2000 cells.
_ELEMENTS_MAX = 2_000_000

Floats = npt.NDArray[np.float64]


def align_of(pairs: Sequence[TokenPair]) -> Align:
    """Return how pairs are joined by default: by position if their prompts are equally long, else by role."""
    return "position" if len({len(pair.clean) for pair in pairs}) == 1 else "role"


def patches_table(plan: SweepPlan, runs: Mapping[RunKey, SweepRun], metrics: Sequence[str]) -> pa.Table:
    """Return the table `patches`."""
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(plan.pairs):
        roles = pair.roles()
        bases = {name: runs[RunKey(pair.id, name)] for name in ("clean", "corrupted")}
        for key in plan.keys(number):
            if not key.site:
                continue
            sender, _, receiver = key.site.partition(">")
            part, at = RowPart.parse(sender), key.position
            cell = {
                "pair": pair.id, "direction": key.direction, "hook": part.site.hook, "layer": part.site.layer,
                "index": part.first, "entries": part.size or None, "receiver": receiver or None,
            }  # fmt: skip
            place: dict[str, Any] = dict.fromkeys(("position", "token", "corrupted_token")) | {"role": "together"}
            if at != TOGETHER:
                place = {
                    "position": at, "token": pair.clean_texts[at], "corrupted_token": pair.corrupted_texts[at],
                    "role": roles[at],
                }  # fmt: skip
            for metric in metrics:
                clean, corrupted = (value_of(bases[name], metric) for name in ("clean", "corrupted"))
                value = value_of(runs[key], metric)
                recovery = (value - corrupted) / (clean - corrupted) if clean != corrupted else math.nan
                rows.append(
                    cell
                    | place
                    | {"metric": metric, "value": value, "clean": clean, "corrupted": corrupted, "recovery": recovery}
                )
    texts = ("pair", "direction", "hook", "receiver", "token", "corrupted_token", "role", "metric")
    numbers = ("layer", "index", "entries", "position")
    return _table(rows, pa.schema([
        (name, pa.string() if name in texts else pa.int32() if name in numbers else pa.float64()) for name in rows[0]
    ]))  # fmt: skip


def pairs_table(plan: SweepPlan, runs: Mapping[RunKey, SweepRun], metrics: Sequence[str]) -> pa.Table:
    """Return the table `pairs`."""
    import pyarrow as pa

    rows = [
        {
            "pair": pair.id, "clean_prompt": pair.clean_text,
            "corrupted_prompt": pair.corrupted_text, "answer": pair.answer_text,
            "wrong_answer": pair.wrong_text, "tokens": len(pair.clean), "metric": metric,
            "clean": value_of(runs[RunKey(pair.id, "clean")], metric),
            "corrupted": value_of(runs[RunKey(pair.id, "corrupted")], metric),
        }
        for pair in plan.pairs for metric in metrics
    ]  # fmt: skip
    kinds = {"tokens": pa.int32(), "clean": pa.float64(), "corrupted": pa.float64()}
    return _table(rows, pa.schema([(name, kinds.get(name, pa.string())) for name in rows[0]]))


def summary_table(
    patches: pa.Table, lengths: Mapping[str, int], align: str, resamples: int, confidence: float
) -> pa.Table:
    """Return the table `summary`. Its `place_number` orders places; `token` is the one that all pairs have there.

    The place `together` is behind all others.

    lengths: how many tokens the prompts of each pair have, by its id.
    """
    import pyarrow as pa

    names = ("pair", "direction", "hook", "layer", "index", "entries", "receiver", "metric", "token")
    columns = {name: patches[name].to_pylist() for name in names}
    places = _places(patches, lengths, align)
    pairs = {name: number for number, name in enumerate(dict.fromkeys(columns["pair"]))}
    cells: dict[tuple[Any, ...], int] = {}
    index = np.array([
        cells.setdefault(cell, len(cells))
        for cell in zip(*(columns[name] for name in names[1:7]), places, columns["metric"], strict=True)
    ])  # fmt: skip
    pair_of = np.array([pairs[name] for name in columns["pair"]])
    value, clean, corrupted = (
        _by_cell(patches[name].to_numpy(), pair_of, index, (len(pairs), len(cells)))
        for name in ("value", "clean", "corrupted")
    )
    means, recoveries = _means(np.ones((1, len(pairs))), value, clean, corrupted)
    present = np.isfinite(value).sum(0)
    bounds = _bounds(value, clean, corrupted, resamples, confidence)
    bounds[:, :, present < PROMPTS_MIN] = np.nan
    tokens: dict[int, set[str]] = {}
    for cell, token in zip(index.tolist(), columns["token"], strict=True):
        tokens.setdefault(cell, set()).add(token)
    rows = []
    behind = max(lengths.values()) if align == "position" else 0
    for (direction, hook, layer, first, entries, receiver, place, metric), cell in cells.items():
        (low, high), (least, most) = bounds[:, :, cell].tolist()
        rows.append({
            "direction": direction, "hook": hook, "layer": layer, "index": first, "entries": entries,
            "receiver": receiver, "place": str(place),
            "place_number": ROLES.index(place) if align == "role" else behind if place == "together" else place,
            "token": next(iter(tokens[cell])) if len(tokens[cell]) == 1 else None, "metric": metric,
            "pairs": int(present[cell]),
            "value": means[0, cell], "value_low": low, "value_high": high, "recovery": recoveries[0, cell],
            "recovery_low": least, "recovery_high": most,
        })  # fmt: skip
    kinds = {name: pa.string() for name in ("direction", "hook", "receiver", "place", "token", "metric")}
    kinds |= {name: pa.int32() for name in ("layer", "index", "entries", "place_number", "pairs")}
    return _table(rows, pa.schema([(name, kinds.get(name, pa.float64())) for name in rows[0]]))


def _places(patches: pa.Table, lengths: Mapping[str, int], align: str) -> list[Any]:
    if align == "role":
        return list(patches["role"].to_pylist())
    names, positions = patches["pair"].to_pylist(), patches["position"].to_pylist()
    start = {name: 0 if align == "position" else length for name, length in lengths.items()}
    return [
        "together" if position is None else position - start[name]
        for name, position in zip(names, positions, strict=True)
    ]


def _by_cell(values: Floats, pairs: npt.NDArray[Any], cells: npt.NDArray[Any], shape: tuple[int, int]) -> Floats:
    """Return the mean of each pair and cell, `[pairs, cells]`; NaN where a pair has no value."""
    totals, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(totals, (pairs, cells), values)
    np.add.at(counts, (pairs, cells), 1.0)
    with np.errstate(invalid="ignore"):
        means: Floats = np.where(counts > 0, totals / counts, np.nan)
    return means


def _bounds(value: Floats, clean: Floats, corrupted: Floats, resamples: int, confidence: float) -> Floats:
    """Return the intervals of the mean value and of the recovery, `[2, 2 (low, high), cells]`.

    Cells are computed in parts, with the same resamples: all of them at once have `[resamples, cells]` values.
    """
    pairs, cells = value.shape
    bounds: Floats = np.full((2, 2, cells), np.nan)
    if pairs < PROMPTS_MIN:
        return bounds
    drawn = draw(["pair"] * pairs, resamples)
    counts = np.stack([np.bincount(each, minlength=pairs) for each in drawn]).astype(np.float64)
    size = max(1, _ELEMENTS_MAX // resamples)
    for start in range(0, cells, size):
        part = slice(start, start + size)
        for number, resampled in enumerate(_means(counts, value[:, part], clean[:, part], corrupted[:, part])):
            bounds[number, :, part] = _intervals(resampled, confidence)
    return bounds


def _intervals(resampled: Floats, confidence: float) -> Floats:
    """Return the interval of each cell, `[2, cells]`, as `interval` does."""
    bounds: Floats = np.full((2, resampled.shape[1]), np.nan)
    whole = np.isfinite(resampled).all(0)
    tail = (1 - confidence) / 2
    bounds[:, whole] = np.quantile(resampled[:, whole], (tail, 1 - tail), axis=0)
    for cell in np.flatnonzero(~whole):
        bounds[:, cell] = interval(resampled[:, cell], confidence)
    return bounds


def _means(counts: Floats, value: Floats, clean: Floats, corrupted: Floats) -> tuple[Floats, Floats]:
    """Return the mean value and the recovery of each resample and cell, `[resamples, cells]`.

    counts: how often each resample has each pair, `[resamples, pairs]`.
    """
    present = np.isfinite(value)
    with np.errstate(invalid="ignore", divide="ignore"):
        totals = [
            counts @ np.where(present, each, 0.0) for each in (value, value - corrupted, clean - corrupted)
        ]  # fmt: skip
        means: Floats = totals[0] / (counts @ present.astype(np.float64))
        recovery: Floats = np.where(totals[2] != 0.0, totals[1] / totals[2], np.nan)
    return means, recovery


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table, with NULL in place of NaN."""
    import pyarrow as pa

    columns = {
        field.name: pa.array([row[field.name] for row in rows], field.type, from_pandas=True) for field in schema
    }
    return pa.table(columns, schema=schema)
