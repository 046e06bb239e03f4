"""The output of a run: its cells, one JSON object a line, added after each block; and the settings that made them.

A cell's `digest` covers all that its values depend on: the model and its files, the engine's arguments, the prompt, the
directions and the sampling. A run that finds a cell with another digest refuses the directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from capflow.errors import UsageError, explain
from capflow_models.experiment.schedule import CellKey
from capflow_models.runs.lines import LineFile
from capflow_models.runs.output import as_json

CELLS = "cells.jsonl"

ROWS = ".capflow-experiment-"
"""How the names of directories for captured rows begin."""


class OutputLines(LineFile):
    """A file of a run's output. Raises UsageError if another run writes it."""

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except UsageError as e:
            do = "wait for it, or choose another directory with --out"
            raise UsageError(explain(f"{self.path}: another run writes it", do=do)) from e


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer with its measurements. A list by position is empty if it was not measured.

    prompt: as the arm asked it.
    tokens: of the answer.
    score_positions, scores: the scored positions, and the gate's probe there before anything steers.
    steered: for each generated position that is an input, how strongly the arm's vector acted, 0..1.
    kl: KL(baseline || this arm) in nats at each token of the baseline's answer, which this arm was forced to generate.
    nll: of each token of this answer under the model without steering, in nats.
    held_out: the second probe's mean score on this answer, read by the model without steering.
    first_firing: the position of the first score at or above the threshold, from the first generated position.
    actions: what the engine reports of actions on the request.
    tokens_per_s: of the batch.
    block, turn: when it ran.
    """

    arm: str
    kind: str
    threshold: float | None
    sharpness: float | None
    scale: float | None
    layer: int | None
    prompt_id: str
    label: str
    seed: int
    digest: str
    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str
    block: int
    turn: int
    score_positions: list[int] = []
    scores: list[float] = []
    steered: list[float] = []
    kl: list[float] = []
    nll: list[float] = []
    held_out: float | None = None
    first_firing: int | None = None
    actions: list[dict[str, Any]] = []
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_per_s: float | None = None
    cached_tokens: int | None = None

    @property
    def key(self) -> CellKey:
        """The cell's place, as `schedule.key_of` makes it."""
        return self.arm, self.threshold, self.sharpness, self.scale, self.layer, self.prompt_id, self.seed


def digest_of(parts: Mapping[str, Any]) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=8).hexdigest()


def read_cells(file: LineFile) -> list[Cell]:
    """Return the cells of a file; NaN and infinities are text there. Raises UsageError for a line that is no cell."""
    cells = []
    for number, line in enumerate(file.lines(), 1):
        try:
            cells.append(msgspec.json.decode(line, type=Cell, strict=False))
        except msgspec.MsgspecError as e:
            where = f"{file.path}, line {number}"
            raise UsageError(explain(where, got=str(e), expected="a cell", do="write to another directory")) from e
    return cells


def encoded(cells: Iterable[Cell]) -> list[bytes]:
    """Return cells as lines. JSON has no NaN and no infinity, so they are written as text."""
    lines = []
    for cell in cells:
        fields = msgspec.to_builtins(cell)
        fields |= {name: as_json(fields[name]) for name in _FLOATS}
        lines.append(msgspec.json.encode(fields))
    return lines


_FLOATS = (
    "threshold", "sharpness", "scale", "scores", "steered", "kl", "nll", "held_out", "ttft_ms", "tpot_ms",
    "tokens_per_s",
)  # fmt: skip


def done_of(cells: Iterable[Cell], digests: Mapping[CellKey, str], where: Path) -> dict[CellKey, Cell]:
    """Return the cells of this experiment that are there. Raises UsageError for one that was made otherwise."""
    done = {}
    for cell in cells:
        digest = digests.get(cell.key)
        if digest is None:
            continue
        if digest != cell.digest:
            place = f"{where}: arm {cell.arm}, prompt {cell.prompt_id}, seed {cell.seed}"
            do = "choose another directory with --out, or remove this one"
            got, expected = "a cell with other settings or another model's files", "this file's settings"
            raise UsageError(explain(place, got=got, expected=expected, do=do))
        done[cell.key] = cell
    return done
