"""What a contender returned, against the reference: rows, scores and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

AGREE, AGREE_EACH = 1e-2, 1e-4
"""How far a number of a row may be off: so much of the row's median number, and so much of itself.

A few numbers of a row are hundreds of times the median, and a row of the first position is larger still. A share of the
largest would let any row pass.
"""


class Reference:
    """What `programs/reference.py` wrote.

    directory: its files.
    layer: which layer is probed.
    """

    def __init__(self, directory: Path, layer: int) -> None:
        import json

        self.rows = np.load(directory / "rows.npy", mmap_mode="r")
        self.scores = np.asarray(self.rows[:, layer]) @ np.load(directory / "weight.npy")
        self.answers: dict[str, Any] = json.loads((directory / "answers.json").read_text())

    def wrong(self, task: str, tokens: list[list[int]], rows: npt.NDArray[Any]) -> tuple[int, int, int]:
        """Return how many answers differ, how many rows or scores differ, and how many there are.

        tokens: what each request generated.
        rows: `[prompts, layers, positions, width]`, or scores `[prompts, positions]`; empty without.
        """
        expected = self.answers["steered" if task == "steer" else "plain"]
        answers = sum(own != right for own, right in zip(tokens, expected, strict=False))
        answers += abs(len(tokens) - len(expected))
        if task == "rows":
            return answers, *differing(rows, self.rows)
        if task == "probe":
            # Compared as the numbers of a row are, prompt by prompt.
            right = rows.shape == self.scores.shape and _close(rows, self.scores)
            return answers, int(self.scores.size - np.sum(right)), self.scores.size
        return answers, 0, 0


def differing(rows: npt.NDArray[Any], right: npt.NDArray[Any]) -> tuple[int, int]:
    """Return how many rows differ from the right ones `[prompts, layers, positions, width]`, and how many there are.

    All rows of another shape are wrong, and so is a row with NaN.
    """
    count = int(np.prod(right.shape[:3]))
    if rows.shape != right.shape:
        return count, count
    wrong = 0
    for layer in range(right.shape[1]):
        wrong += int((~_close(rows[:, layer], np.asarray(right[:, layer])).all(-1)).sum())
    return wrong, count


def _close(values: npt.NDArray[Any], right: npt.NDArray[Any]) -> Any:
    """Return which numbers `[…, numbers of a row]` are as the right ones; NaN is not."""
    sizes = np.abs(right)
    allowed = AGREE * np.median(sizes, -1, keepdims=True) + AGREE_EACH * sizes
    return np.abs(values.astype(np.float32) - right) <= allowed
