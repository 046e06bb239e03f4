"""The bank: the steering vectors in use, one device row each, shared by content and counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from capflow.errors import CapflowError, explain


class Bank:
    """Rows of `[capacity, hidden]` in the model's dtype. rows: what the taps read; it never moves.

    A vector is rounded once, to the model's dtype, when it is put in.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._used: dict[bytes, int] = {}  # a vector's rounded bytes → its row
        self._content: dict[int, bytes] = {}  # the other way round
        self._holders: dict[int, int] = {}  # a row → how many requests and sites hold it
        self._free = list(range(rows.shape[0] - 1, -1, -1))

    def acquire(self, vector: npt.NDArray[np.float32]) -> int:
        """Return the row that holds `vector`, `[hidden]`; each call is matched by one `release`.

        Raises CapflowError when every row is in use; the scheduler's admission keeps that from happening.
        """
        rounded = torch.from_numpy(np.array(vector)).to(self.rows.dtype)
        content = rounded.view(torch.uint8).numpy().tobytes()
        row = self._used.get(content)
        if row is None:
            if not self._free:
                raise CapflowError(
                    explain("steering bank", got=f"{self.rows.shape[0]} vectors in use", do="raise bank_rows_max")
                )
            row = self._free.pop()
            source = (
                rounded.pin_memory() if self.rows.is_cuda else rounded
            )  # from elsewhere, a copy waits for the device
            self.rows[row].copy_(source, non_blocking=True)
            self._used[content], self._content[row], self._holders[row] = row, content, 0
        self._holders[row] += 1
        return row

    def release(self, row: int) -> None:
        """Give back what one `acquire` took; the row is free when nobody holds it."""
        self._holders[row] -= 1
        if not self._holders[row]:
            del self._holders[row], self._used[self._content.pop(row)]
            self._free.append(row)

    def __len__(self) -> int:
        return len(self._used)
