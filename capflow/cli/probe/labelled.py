"""Labelled rows of a captured data set, and their scores under a probe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import capflow
from capflow import limits
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.probe import Pool, as_float32

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]

_BYTES_MAX = 4096 * limits.MIB


@dataclass(frozen=True)
class LabelledRows:
    """Rows of labelled requests at one site.

    requests: the ids of the requests.
    rows: for each request `[n, hidden_size]` float32, n at least 1.
    positions: for each request `[n]`.
    labels: `[requests]`, True for the positive label.
    """

    requests: tuple[str, ...]
    rows: tuple[npt.NDArray[np.float32], ...]
    positions: tuple[npt.NDArray[Any], ...]
    labels: Bools

    @classmethod
    def read(cls, path: Path, labels: Mapping[str, bool], site: Site, positions: Positions) -> LabelledRows:
        """Read the rows of the labelled requests that were captured whole.

        Raises UsageError if a label has no such request, or if the rows exceed 4 GiB.
        """
        data = capflow.open(path)
        requests, rows, kept, total = [], [], [], 0
        for request in labels:
            if request not in data or site not in (capture := data[request]):
                continue
            captured = capture[site]
            places = positions.at(capture.prompt_length)
            chosen = np.array([int(position) in places for position in captured.positions], bool)
            if chosen.any():
                requests.append(request)
                rows.append(as_float32(np.asarray(captured.rows)[chosen]))
                kept.append(np.asarray(captured.positions)[chosen])
                total += rows[-1].nbytes
            if total > _BYTES_MAX:
                do = "choose fewer rows with --positions, or label fewer requests"
                raise UsageError(
                    explain(f"{path}: rows", got=f"{total} bytes", expected=f"at most {_BYTES_MAX}", do=do)
                )
        read = cls(tuple(requests), tuple(rows), tuple(kept), np.array([labels[request] for request in requests], bool))
        if not requests:
            expected = f"rows at {site} of the {len(labels)} requests that are labelled"
            raise UsageError(
                explain(str(path), got="none", expected=expected, do="`request` is the id as it was captured")
            )
        read.check_both(str(path), 1)
        return read

    def check_both(self, where: str, least: int) -> None:
        """Raise UsageError unless each label has at least `least` requests."""
        counts = [int((self.labels == label).sum()) for label in (True, False)]
        if min(counts) < least:
            got = f"{counts[0]} requests of the positive label and {counts[1]} of the other"
            raise UsageError(explain(where, got=got, expected=f"at least {least} of each, with rows"))

    def check_finite(self, where: str, values: Sequence[Floats]) -> None:
        """Raise UsageError with the request and position unless `values`, `[n, …]` for each request, are finite."""
        for request, positions, part in zip(self.requests, self.positions, values, strict=True):
            odd = ~np.isfinite(part).all(axis=1)
            if odd.any():
                got = f"NaN or infinity at position {positions[odd.argmax()]} of request {request}"
                do = "leave the request out of the labels, or the position out with --positions"
                raise UsageError(explain(where, got=got, expected="finite numbers", do=do))

    def part(self, numbers: Iterable[int]) -> LabelledRows:
        """Return some of the requests."""
        chosen = sorted(numbers)
        requests, rows = tuple(self.requests[i] for i in chosen), tuple(self.rows[i] for i in chosen)
        positions = tuple(self.positions[i] for i in chosen)
        return LabelledRows(requests, rows, positions, self.labels[chosen])

    def examples(self, pool: Pool) -> tuple[npt.NDArray[np.float32], Bools]:
        """Return the examples on which a probe is fitted, `[n, hidden_size]`, and their labels `[n]`.

        For the pools `token` and `max` each row is an example; for `mean` and `last` each request is one.
        """
        if pool == "mean":
            return np.stack([rows.mean(axis=0, dtype=np.float64).astype(np.float32) for rows in self.rows]), self.labels
        if pool == "last":
            return np.stack([rows[-1] for rows in self.rows]), self.labels
        return np.concatenate(self.rows), np.repeat(self.labels, [len(rows) for rows in self.rows])

    def judged(self, scorer: Any) -> tuple[Floats, Bools]:
        """Return scores `[n, k]` and labels `[n]`, where n counts rows for the pool `token`, else requests.

        Raises UsageError if a row or a score is not finite.
        """
        self.check_finite("captured rows", self.rows)
        with np.errstate(over="ignore", invalid="ignore"):  # check_finite refuses the result
            scores = [scorer.scores(rows) for rows in self.rows]
        self.check_finite("scores", scores)
        if scorer.pool == "token":
            return np.concatenate(scores), np.repeat(self.labels, [len(rows) for rows in self.rows])
        pools = {
            "mean": lambda s: s.mean(axis=0, dtype=np.float64),
            "max": lambda s: s.max(axis=0),
            "last": lambda s: s[-1],
        }
        return np.stack([pools[scorer.pool](part) for part in scores]), self.labels
