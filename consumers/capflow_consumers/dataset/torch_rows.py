"""A captured data set as a PyTorch `IterableDataset`: batches of rows, shuffled, and divided among workers and ranks.

Invariants:

* Over one epoch, each row of the chosen sites is in exactly one batch of exactly one worker of one rank.
* The data set is as it was when `TorchRows` was made. Requests that appear later are not in it.
* `shuffle_rows` bounds the memory, whatever the size of the data set. Rows are mapped, and a worker reads its own share
  only.

This is the only module of the consumers that imports torch. No other module imports it; training code does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES
from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow_consumers.dataset.capture import steered_at
from capflow_consumers.dataset.contents import Contents, one_width
from capflow_consumers.dataset.reader import RequestCapture, Rows, open_dataset

require("torch", "capflow.TorchRows")

import torch  # noqa: E402
import torch.distributed  # noqa: E402
from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402

_SHARE_ROWS = 64
"""Shares are made of blocks of this many adjacent rows. The shares of two workers differ by at most one block."""


class TorchBatch(NamedTuple):
    """Rows of several requests and sites.

    rows: `[n, width]`, as stored unless another dtype was asked for.
    sites: `[n]` int64, indices into `TorchRows.sites`.
    positions: `[n]` int64.
    token_ids: `[n]` int32, -1 where the engine sent none.
    steered: `[n]` bool, whether the row's position was steered; False where the data set does not say it.
    """

    rows: torch.Tensor
    sites: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    steered: torch.Tensor


class TorchRows(IterableDataset[TorchBatch]):
    """The rows of a data set, in batches; pass it to a `DataLoader` with `batch_size=None`.

    sites: `(layer, hook)` or `"hook:layer"`; all by default.
    batch_rows: the rows of each batch; the last batch of each worker may have fewer.
    shuffle_rows: the size of the buffer that rows are drawn from at random; requests come in a random order too. 0
        keeps the order of the data set.
    seed: the same seed, epoch, ranks and workers give the same batches.
    dtype: of the rows; None leaves them as stored, bfloat16 bit for bit.
    rank, world_size: by default those of `torch.distributed` where it is initialised, else RANK and WORLD_SIZE as
        torchrun sets them, else 0 and 1.

    hidden_size: the width of the rows.
    row_shape: the shape of a row, for `batch.rows.unflatten(1, row_shape)`: `(hidden_size,)`, or with sites of one
        other shape that one, such as `(heads, head_dim)`.

    Raises UsageError for a path that is no data set, a data set without rows, a site without rows, rows of different
    widths, and rows of different dtypes unless `dtype` is given.
    While it is iterated, it raises CapflowError for a file that is not as it was written.
    """

    def __init__(
        self,
        path: str | Path,
        sites: Sequence[tuple[int, str] | str] = (),
        *,
        batch_rows: int = 1024,
        shuffle_rows: int = 16_384,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = _place(rank, world_size)
        self._batch_rows = _at_least(batch_rows, 1, "batch_rows")
        self._shuffle_rows = _at_least(shuffle_rows, 0, "shuffle_rows")
        self._seed = _at_least(seed, 0, "seed")
        self._dtype = dtype
        dataset = open_dataset(path)
        self._path = dataset.source
        contents = Contents(
            dataset.path, (Site.parse(site) if isinstance(site, str) else Site(*site) for site in sites)
        )
        counts: dict[str, Counter[Site]] = {}
        for capture in dataset:
            counts.setdefault(capture.id, Counter()).update(contents.add(capture))
        present = contents.sites("sites")
        self.sites: tuple[Site, ...] = tuple(present)
        self.hidden_size = one_width(present)
        shapes = {shape for contents in present.values() for shape in contents.shapes}
        self.row_shape: tuple[int, ...] = next(iter(shapes)) if len(shapes) == 1 else (self.hidden_size,)
        self._requests = list(counts)
        self._counts = np.array([[count[site] for site in self.sites] for count in counts.values()], np.int64)
        self.rows_total = int(self._counts.sum())
        self._stored = _stored({name for site in present.values() for name in site.dtypes}, dtype)
        # Shared memory, so that persistent workers see a new epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iterations shuffle by. Without it, each iteration repeats the one before."""
        self._epoch.fill_(_at_least(epoch, 0, "epoch"))

    def __iter__(self) -> Iterator[TorchBatch]:
        """Yield the batches of this worker's share; of this rank's share where there are no workers."""
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        shares, share = self.world_size * workers, self.rank * workers + number
        epoch = [self._seed, int(self._epoch)]
        order = np.arange(len(self._requests))
        if self._shuffle_rows:
            np.random.default_rng(epoch).shuffle(order)  # the same in every worker of every rank
        generator = np.random.default_rng([*epoch, 1 + share]) if self._shuffle_rows else None
        buffer = _Buffer(max(self._shuffle_rows, self._batch_rows), self.hidden_size, self._stored, generator)
        for rows, places in self._parts(order, share, shares):
            taken = 0
            while taken < len(rows):
                taken += buffer.add(rows[taken:], places[taken:])
                if buffer.is_full:
                    yield self._batch(*buffer.take(self._batch_rows))
        while buffer.filled:
            yield self._batch(*buffer.take(self._batch_rows))

    def _parts(
        self, order: npt.NDArray[np.int64], share: int, shares: int
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
        """Yield the rows `[n, width]` of a share, and `[n, 4]` int64 of their places.

        A place is site index, position, token id, and whether the position was steered.
        """
        dataset = open_dataset(self._path)
        start = 0  # of a request's rows at a site, among all rows
        for index in order:
            request = self._requests[index]
            captures: list[RequestCapture] | None = None
            for site, count in enumerate(self._counts[index].tolist()):
                spans = list(_spans(start, count, share, shares))
                start += count
                if spans:
                    captures = dataset.captures(request, look=False) if captures is None else captures
                    present = [capture for capture in captures if self.sites[site] in capture]
                    if sum(capture.rows_at(self.sites[site]) for capture in present) != count:
                        raise self._changed(request)
                    parts = (
                        (part, steered_at(capture.sidecar, part.positions))
                        for capture in present
                        for part in capture.in_batches(self.sites[site])
                    )
                    yield from _cut(parts, site, spans)

    def _changed(self, request: str) -> CapflowError:
        do = "make a new TorchRows, which reads the data set as it is now"
        return CapflowError(explain(f"{self._path}: request {request!r} has changed", do=do))

    def _batch(self, rows: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> TorchBatch:
        # torch does not know numpy's bfloat16; the bits pass as int16.
        bfloat16 = rows.dtype.name == "bfloat16"
        tensor = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(rows)
        sites, positions, token_ids, steered = torch.from_numpy(places).unbind(1)
        tensor = tensor if self._dtype is None else tensor.to(self._dtype)
        ids, flags = token_ids.to(torch.int32), steered.to(torch.bool)
        return TorchBatch(tensor, sites.contiguous(), positions.contiguous(), ids, flags)


class _Buffer:
    """Rows and their places, from which batches are drawn.

    filled: how many rows there are; they lie at the front.
    generator: draws a batch at random; None takes all rows, in the order they came.
    """

    def __init__(self, size: int, width: int, dtype: npt.DTypeLike, generator: np.random.Generator | None) -> None:
        self.filled = 0
        self._rows = np.empty((size, width), dtype)
        self._places = np.empty((size, 4), np.int64)
        self._generator = generator

    @property
    def is_full(self) -> bool:
        """Whether a batch must be taken before a row can be added."""
        return self.filled == len(self._rows)

    def add(self, rows: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> int:
        """Copy in as many rows as there is room for; return how many that is."""
        count = min(len(rows), len(self._rows) - self.filled)
        self._rows[self.filled : self.filled + count] = rows[:count]
        self._places[self.filled : self.filled + count] = places[:count]
        self.filled += count
        return count

    def take(self, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Remove and return `count` rows, or all where there are fewer; they are copies."""
        count = min(count, self.filled)
        if self._generator is None:
            picks = np.arange(count)
        else:
            picks = self._generator.choice(self.filled, count, replace=False)
        taken = self._rows[picks], self._places[picks]
        self.filled -= count
        # Rows above `filled` move into the holes below it.
        holes = picks[picks < self.filled]
        above = np.setdiff1d(np.arange(self.filled, self.filled + count), picks, assume_unique=True)
        self._rows[holes], self._places[holes] = self._rows[above], self._places[above]
        return taken


def _cut(
    captures: Iterable[tuple[Rows, npt.NDArray[np.bool_] | None]], site: int, spans: list[tuple[int, int]]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    """Yield the spans of the rows of several captures, counted over all of them, in the form of `TorchRows._parts`.

    captures: the rows, each with whether they were steered, if that is known.
    """
    begin = 0
    for (rows, positions, token_ids), steered in captures:
        for first, last in spans:
            low, high = max(first - begin, 0), min(last - begin, len(rows))
            if low < high:
                ids = token_ids[low:high].astype(np.int64)
                flags = np.zeros_like(ids) if steered is None else steered[low:high]
                yield rows[low:high], np.stack([np.full_like(ids, site), positions[low:high], ids, flags], axis=1)
        begin += len(rows)


def _spans(start: int, count: int, share: int, shares: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of a share among `count` adjacent rows, as `(first, last + 1)`.

    start: the number of the first of these rows among all rows.
    """
    block = start // _SHARE_ROWS
    block += (share - block) % shares
    while block * _SHARE_ROWS < start + count:
        first, last = block * _SHARE_ROWS - start, (block + 1) * _SHARE_ROWS - start
        yield max(first, 0), min(last, count)
        block += shares


def _stored(names: set[str], dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype in which rows are kept until they are in a batch."""
    if len(names) == 1:
        return DTYPES[names.pop()]
    if dtype is None:
        raise UsageError(explain("rows", got=f"dtypes {', '.join(sorted(names))}", do="choose one with dtype="))
    return DTYPES["float32"]


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            explain("rank, world_size", got=(rank, world_size), expected="both, and 0 <= rank < world_size")
        )
    return rank, world_size


def _at_least(value: int, least: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(explain(field, got=value, expected=f"an integer of {least} or more"))
    return value
