"""The gates of one step on the CPU: their margins, and the values by which they multiply the amounts of operations.

The margin of a gate at a token is its score minus its threshold; -inf where the token is not scored. The code of gate
`g` is `2 * g`, plus 1 if the gate is latched. A latched gate's margin is the largest of the token's own, those of the
request's earlier tokens in the step, and what the request carries from earlier steps. A hard gate has sharpness inf.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from capflow_engine.taps.plan import Plan

Tokens = slice | torch.Tensor
"""Token rows of a step; a slice if they are contiguous."""


class Gating:
    """The gates of one step.

    margins: float32 `[gates, tokens]`, of this step so far.
    """

    def __init__(self, plan: Plan, tokens: int, carried: torch.Tensor | None, received: torch.Tensor | None) -> None:
        """Start a step.

        tokens: the number of token rows.
        carried: float32 `[gates, latched requests]`, in the order of `plan.latched`; None if there are none.
        received: the margins that earlier pipeline stages scored, for the first token rows; None at the first stage.
        """
        self.margins = torch.full((plan.gates, tokens), -math.inf)
        if received is not None:
            self.margins[:, : received.shape[1]] = received
        # Counts the scores.
        self._scored = 0
        # By code and sharpness: the number of scores at the time, and the value of the gate at each token.
        self._values: dict[tuple[int, float], tuple[int, torch.Tensor]] = {}
        self._carried = carried
        # The column of `carried` of each token; None if that is its number.
        self._columns: torch.Tensor | None = None
        # The requests that are latched and have several tokens: their first rows and their end rows.
        self._chunks: list[tuple[int, int]] = []
        if carried is not None:
            columns = np.full(tokens, carried.shape[1])
            for column, number in enumerate(plan.latched):
                _, row, _, length = plan.batch[number]
                columns[row : row + length] = column
                if length > 1:
                    self._chunks.append((row, row + length))
            if carried.shape[1] != tokens:  # else each request has one token, and all are latched
                self._columns = torch.from_numpy(columns)
                self._carried = torch.cat((carried, torch.full((carried.shape[0], 1), -math.inf)), 1)

    @property
    def scored(self) -> int:
        """A number that changes with each score."""
        return self._scored

    def put(self, gates: int | torch.Tensor, tokens: Tokens, margins: torch.Tensor) -> None:
        """Write the margins of some tokens.

        gates: the gate of each token; one number if all have the same.
        margins: changed in place: NaN becomes -inf.
        """
        self._scored += 1
        margins.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        if isinstance(gates, int):
            self.margins[gates][tokens] = margins
        elif isinstance(tokens, slice):
            self.margins[gates, torch.arange(tokens.start, tokens.stop)] = margins
        else:
            self.margins[gates, tokens] = margins

    def value(self, code: int, sharpness: float) -> torch.Tensor:
        """Return the value of a gate at each token of the step, 0 to 1."""
        scored, value = self._values.get((code, sharpness), (-1, None))
        if value is None or scored != self._scored:
            value = _opened(self._margins(code), sharpness)
            self._values[code, sharpness] = self._scored, value
        return value

    def values(
        self, codes: npt.NDArray[np.int32], sharpness: npt.NDArray[np.float32], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the value of each token's gate.

        codes: the code of each token's gate; -1: none, which has the value 1.
        """
        margins = torch.full((len(codes),), math.inf)
        for code in np.unique(codes[codes >= 0]).tolist():
            mine = torch.from_numpy(np.flatnonzero(codes == code))
            margins[mine] = self._margins(code)[tokens[mine]]
        sharp = torch.from_numpy(np.where(codes >= 0, sharpness, np.float32(math.inf)))
        return torch.where(sharp.isinf(), (margins >= 0).float(), torch.sigmoid(sharp * margins))

    def _margins(self, code: int) -> torch.Tensor:
        own = self.margins[code // 2]
        if code % 2 == 0:
            return own
        assert self._carried is not None
        carried = self._carried[code // 2]
        latched = torch.maximum(own, carried if self._columns is None else carried[self._columns])
        for begin, end in self._chunks:
            latched[begin:end] = latched[begin:end].cummax(0).values
        return latched


def _opened(margins: torch.Tensor, sharpness: float) -> torch.Tensor:
    return (margins >= 0).float() if math.isinf(sharpness) else torch.sigmoid(margins * sharpness)


class Factor:
    """The values of the gates of some tokens' operations, for all sites where these tokens have the same gates.

    codes, sharpness: of each token's gate.
    """

    def __init__(self, codes: npt.NDArray[np.int32], sharpness: npt.NDArray[np.float32], tokens: Tokens) -> None:
        self._codes, self._sharpness, self._tokens = codes, sharpness, tokens
        self._single = bool((codes == codes[0]).all() and (sharpness == sharpness[0]).all())
        # The gates of the step and the number of scores that the value is of.
        self._of: tuple[Gating | None, int] = None, -1
        self._value: torch.Tensor | None = None

    def of(self, gating: Gating) -> torch.Tensor | None:
        """Return the value of each token, `[tokens]`; None if all are 0."""
        if self._of != (gating, gating.scored):
            self._of = gating, gating.scored
            if self._single:
                value = gating.value(int(self._codes[0]), float(self._sharpness[0]))[self._tokens]
            else:
                value = gating.values(self._codes, self._sharpness, numbers_of(self._tokens))
            self._value = value if value.any() else None
        return self._value


def numbers_of(tokens: Tokens) -> torch.Tensor:
    """Return token rows as indices."""
    return torch.arange(tokens.start, tokens.stop) if isinstance(tokens, slice) else tokens
