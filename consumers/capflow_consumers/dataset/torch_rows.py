"""A captured data set as a PyTorch `IterableDataset`: batches of rows, shuffled, shared out over workers and ranks.

What always holds: over one epoch, each row of the chosen sites is in exactly one batch of exactly one worker of one rank. The data set
is what it was when `TorchRows` was made: requests that appear later are not in it. Memory is bounded by `shuffle_rows`, whatever
the data set's size; rows are mapped, and only those of a worker's own share are read.

The only module of the consumers that imports torch; nothing imports it but who trains.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from capflow.capture.dtypes import DTYPES
from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow_consumers.dataset.contents import Contents, one_width
from capflow_consumers.dataset.reader import RequestCapture, Rows, open_dataset

_SHARE_ROWS = 64
"""Rows that lie together are shared out so many at a time: the shares of two workers differ by at most these."""


class TorchBatch(NamedTuple):
    """Rows of several requests and sites.

    rows: `[n, hidden_size]`, as stored unless another dtype was asked for.
    sites: `[n]` int64, an index into `TorchRows.sites`.
    positions: `[n]` int64.
    token_ids: `[n]` int32, -1 where the engine did not say.
    """

    rows: torch.Tensor
    sites: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


class TorchRows(IterableDataset[TorchBatch]):
    """The rows of a data set, in batches; give it to a `DataLoader` with `batch_size=None`.

    sites: `(layer, hook)` or `"hook:layer"`; all by default.
    batch_rows: rows of each batch but the last of each worker.
    shuffle_rows: the bound of the buffer that rows are drawn from at random, and 0 for the order of the data set;
        requests come in a random order too.
    seed: the same seed, epoch, ranks and workers give the same batches.
    dtype: of the rows; None leaves them as stored, bfloat16 bit for bit.
    rank, world_size: by default those of `torch.distributed` where that is initialised, else what torchrun says in RANK
        and WORLD_SIZE, else 0 and 1.

    Raises UsageError for a path that is no data set, for one without rows, for a site that has none, and for rows of
    several widths or, unless a dtype is asked for, of several dtypes; and CapflowError while it is iterated, for a file that is not what was written.
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
        self._path = dataset.path
        contents = Contents(self._path, (Site.parse(site) if isinstance(site, str) else Site(*site) for site in sites))
        counts: dict[str, Counter[Site]] = {}
        for capture in dataset:
            counts.setdefault(capture.id, Counter()).update(contents.add(capture))
        found = contents.sites("sites")
        self.sites: tuple[Site, ...] = tuple(found)
        self.hidden_size = one_width(found)
        self._requests = list(counts)
        self._counts = np.array([[count[site] for site in self.sites] for count in counts.values()], np.int64)
        self.rows_total = int(self._counts.sum())
        self._stored = _stored({name for told in found.values() for name in told.dtypes}, dtype)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # seen by workers that persist

    def set_epoch(self, epoch: int) -> None:
        """Have the next iterations shuffle as this epoch; without, each is like the one before."""
        self._epoch.fill_(_at_least(epoch, 0, "epoch"))

    def __iter__(self) -> Iterator[TorchBatch]:
        """Yield the batches of this worker's share, or of this rank's where there are no workers."""
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        shares, share = self.world_size * workers, self.rank * workers + number
        epoch = [self._seed, int(self._epoch)]
        order = np.arange(len(self._requests))
        if self._shuffle_rows:
            np.random.default_rng(epoch).shuffle(order)  # the same in every worker of every rank
        mine = np.random.default_rng([*epoch, 1 + share]) if self._shuffle_rows else None
        buffer = _Buffer(max(self._shuffle_rows, self._batch_rows), self.hidden_size, self._stored, mine)
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
        """Yield the rows `[n, hidden_size]` of a share, with `[n, 3]` of site, position and token id."""
        dataset = open_dataset(self._path)
        start = 0  # of a request's rows at a site, in the order of all rows
        for index in order:
            request = self._requests[index]
            captures: list[RequestCapture] | None = None
            for site, count in enumerate(self._counts[index].tolist()):
                spans = list(_spans(start, count, share, shares))
                start += count
                if spans:
                    captures = dataset.captures(request, look=False) if captures is None else captures
                    found = [capture for capture in captures if self.sites[site] in capture]
                    if sum(capture.rows_at(self.sites[site]) for capture in found) != count:
                        raise self._changed(request)
                    parts = itertools.chain.from_iterable(capture.in_batches(self.sites[site]) for capture in found)
                    yield from _cut(parts, site, spans)

    def _changed(self, request: str) -> CapflowError:
        what = f"{self._path}: request {request!r} is not what it was"
        return CapflowError(explain(what, do="make another TorchRows of what is there now"))

    def _batch(self, rows: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> TorchBatch:
        # torch knows nothing of numpy's bfloat16, but that it is 16 bits.
        bfloat16 = rows.dtype.name == "bfloat16"
        tensor = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(rows)
        sites, positions, token_ids = torch.from_numpy(places).unbind(1)
        tensor = tensor if self._dtype is None else tensor.to(self._dtype)
        return TorchBatch(tensor, sites.contiguous(), positions.contiguous(), token_ids.to(torch.int32))


class _Buffer:
    """Rows and their places, of which a batch is drawn at random, or with `generator` None all in the order they came."""

    def __init__(self, size: int, width: int, dtype: npt.DTypeLike, generator: np.random.Generator | None) -> None:
        self.filled = 0
        self._rows = np.empty((size, width), dtype)
        self._places = np.empty((size, 3), np.int64)
        self._generator = generator

    @property
    def is_full(self) -> bool:
        """Whether nothing can be added before a batch is taken."""
        return self.filled == len(self._rows)

    def add(self, rows: npt.NDArray[Any], places: npt.NDArray[np.int64]) -> int:
        """Copy in as many rows as there is room for; return how many."""
        count = min(len(rows), len(self._rows) - self.filled)
        self._rows[self.filled : self.filled + count] = rows[:count]
        self._places[self.filled : self.filled + count] = places[:count]
        self.filled += count
        return count

    def take(self, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Take out so many rows, or all where there are fewer; they are the caller's."""
        count = min(count, self.filled)
        if self._generator is None:
            picks = np.arange(count)
        else:
            picks = self._generator.choice(self.filled, count, replace=False)
        taken = self._rows[picks], self._places[picks]
        self.filled -= count
        # What stays lies below `filled`: rows from above it move to where rows were taken below it.
        holes = picks[picks < self.filled]
        above = np.setdiff1d(np.arange(self.filled, self.filled + count), picks, assume_unique=True)
        self._rows[holes], self._places[holes] = self._rows[above], self._places[above]
        return taken


def _cut(
    found: Iterable[Rows], site: int, spans: list[tuple[int, int]]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    """Yield what spans of the rows of several captures, one after another, are, as `TorchRows._parts` does."""
    begin = 0
    for rows, positions, token_ids in found:
        for first, last in spans:
            low, high = max(first - begin, 0), min(last - begin, len(rows))
            if low < high:
                ids = token_ids[low:high].astype(np.int64)
                yield rows[low:high], np.stack([np.full_like(ids, site), positions[low:high], ids], axis=1)
        begin += len(rows)


def _spans(start: int, count: int, share: int, shares: int) -> Iterator[tuple[int, int]]:
    """Yield which of `count` rows, the first of them row `start` of all, are of a share, as `first, last + 1`."""
    block = start // _SHARE_ROWS
    block += (share - block) % shares
    while block * _SHARE_ROWS < start + count:
        first, last = block * _SHARE_ROWS - start, (block + 1) * _SHARE_ROWS - start
        yield max(first, 0), min(last, count)
        block += shares


def _stored(names: set[str], dtype: torch.dtype | None) -> np.dtype[Any]:
    """Return the dtype to keep rows in until they are in a batch."""
    if len(names) == 1:
        return DTYPES[names.pop()]
    if dtype is None:
        raise UsageError(explain("rows", got=f"dtypes {', '.join(sorted(names))}", do="choose one with dtype="))
    return DTYPES["float32"]


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and how many there are."""
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise UsageError(
            explain("rank, world_size", got=(rank, world_size), expected="both, and 0 <= rank < world_size")
        )
    return rank, world_size


def _at_least(value: int, least: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(explain(field, got=value, expected=f"an integer of {least} or more"))
    return value
