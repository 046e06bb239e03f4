"""The results as tables: Parquet files, and one DuckDB file with the same tables.

| table | a row for each |
|---|---|
| cells | answer: the axes of its setting, texts, and each metric |
| tokens | position of an answer: its score, how strongly the arm steered there, KL and negative log probability |
| metrics | setting, label and metric: mean, interval, and the difference to the baseline |
| matches | gated setting: effect, harm, and an always-on arm's harm at the same effect |
| separations | setting whose scores separate the labels: the area under the ROC curve, with its interval |
| roc | threshold of that curve |
| fits | probe or vector: how it was made |
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import DirectionFit
from capflow_models.experiment.records import Cell
from capflow_models.experiment.results.metrics import ResultTables, value_of

_AXES = ("arm", "kind", "threshold", "sharpness", "scale", "layer", "prompt_id", "label", "seed")
_TEXTS = ("prompt", "text", "finish", "prompt_tokens", "block", "turn")


def export(
    experiment: Experiment,
    cells: Sequence[Cell],
    judged: Mapping[str, float],
    tables: ResultTables,
    fits: Sequence[DirectionFit],
    out: Path,
) -> None:
    """Write the tables; existing ones are replaced, each whole. A table without rows has no file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: dict[str, list[dict[str, Any]]] = {
        "cells": [_cell(cell, experiment, judged) for cell in cells],
        "tokens": [row for cell in cells for row in _tokens(cell)],
        "metrics": [_plain(msgspec.to_builtins(row)) for row in tables.rows],
        "matches": [_match(match) for match in tables.matches],
        "separations": [
            _plain({name: getattr(each, name) for name in ("setting", "auc", "low", "high")})
            for each in tables.separations
        ],
        "roc": [
            {"setting": each.setting, "threshold": threshold, "false": false, "true": true}
            for each in tables.separations
            for threshold, false, true in zip(each.thresholds, each.false, each.true, strict=True)
        ],
        "fits": [_plain(msgspec.to_builtins(fit)) for fit in fits],
    }
    paths = {}
    for name, each in rows.items():
        if each:
            paths[name] = out / f"{name}.parquet"
            new = out / f".{name}.parquet.new"
            pq.write_table(pa.Table.from_pylist(each), new)
            new.replace(paths[name])
        else:
            (out / f"{name}.parquet").unlink(missing_ok=True)
    _database(paths, out / "experiment.duckdb")


def _database(paths: Mapping[str, Path], file: Path) -> None:
    import duckdb

    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with duckdb.connect(str(new)) as database:
        for name, path in paths.items():
            database.execute(f"CREATE TABLE {name} AS SELECT * FROM read_parquet(?)", [os.fspath(path)])  # noqa: S608
    new.replace(file)


def _cell(cell: Cell, experiment: Experiment, judged: Mapping[str, float]) -> dict[str, Any]:
    values = {metric: value_of(cell, metric, judged) for metric in experiment.metrics}
    return _plain({name: getattr(cell, name) for name in (*_AXES, *_TEXTS)} | values)


def _tokens(cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield a row for each position from the prompt's first scored one to the last of either answer."""
    axes = {name: getattr(cell, name) for name in _AXES}
    scores = dict(zip(cell.score_positions, cell.scores, strict=True))
    longest = cell.prompt_tokens + max(len(cell.tokens), len(cell.kl))
    for position in range(min(scores, default=cell.prompt_tokens), longest):
        place = position - cell.prompt_tokens
        row = {
            "position": position,
            "place": place,
            "token": _at(cell.tokens, place),
            "score": scores.get(position),
            "steered": _at(cell.steered, place),
            "kl": _at(cell.kl, place),
            "nll": _at(cell.nll, place),
        }
        yield _plain(axes | row)


def _match(match: Any) -> dict[str, Any]:
    row = {"setting": match.setting, "other": match.other, "reached": match.reached}
    for name in ("effect", "harm", "other_harm", "difference"):
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), getattr(match, name), strict=True))
    return _plain(row)


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if 0 <= place < len(values) else None


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with NULL in place of NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
