"""A captured request, as readers of a data set get it: its sidecar, and its rows by site, in any layout."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Weights
from capflow.capture.intervals import Intervals
from capflow.capture.result import joined_weights
from capflow.capture.site import Site, site_named
from capflow.errors import CapflowError, UsageError, explain
from capflow.text.brief import brief
from capflow.text.tabular import Tabular
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.derived import DerivedRows
from capflow_consumers.dataset.rows import shown
from capflow_consumers.dataset.tables import arrow_of, capture_html

if TYPE_CHECKING:
    import pyarrow as pa


class Shaped:
    """Rows that have a shape.

    rows: `[n, width]`.
    row_shape: the shape of a row, whose product is the width: `(hidden_size,)`, or at `heads` `(heads, head_dim)`.
    """

    rows: npt.NDArray[Any]
    row_shape: tuple[int, ...] = ()

    @property
    def shaped(self) -> npt.NDArray[Any]:
        """The rows in their own shape, a view: `[n, hidden_size]`, or at `heads` `[n, heads, head_dim]`."""
        return self.rows.reshape(len(self.rows), *(self.row_shape or self.rows.shape[1:]))


class _Columns(NamedTuple):
    rows: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class Rows(Shaped, _Columns):
    """A site's rows: a tuple of three arrays.

    rows: `[n, width]`, as stored.
    positions: `[n]` int64.
    token_ids: `[n]` int32, -1 where the engine sent none.
    """

    def __new__(
        cls,
        rows: npt.NDArray[Any],
        positions: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        row_shape: tuple[int, ...] = (),
    ) -> Self:
        """Return rows; without `row_shape`, that of `rows`."""
        made = super().__new__(cls, rows, positions, token_ids)
        made.row_shape = tuple(row_shape or rows.shape[1:])
        return made

    def __repr__(self) -> str:
        return brief(self)

    def part(self, start: int, stop: int) -> Rows:
        """Return rows `start..stop`, as views."""
        return self.chosen(slice(start, stop))

    def chosen(self, which: Any) -> Rows:
        """Return the rows that a slice, a mask or indices choose."""
        return Rows(self.rows[which], self.positions[which], self.token_ids[which], self.row_shape)


def concatenated(parts: Sequence[Rows]) -> Rows:
    """Return rows of one site one after another; raises UsageError when they have different shapes."""
    if len(parts) == 1:
        return parts[0]
    shape = one_shape(parts)
    rows, positions, token_ids = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Rows(rows, positions, token_ids, shape)


def one_shape(parts: Sequence[Rows]) -> tuple[int, ...]:
    """Return the shape of a row of all parts; raises UsageError when they have several."""
    shapes = sorted({part.row_shape for part in parts})
    if len(shapes) != 1:
        got = " and ".join(str(list(shape)) for shape in shapes)
        expected = "rows of one model; keep each model in a data set of its own"
        raise UsageError(explain("rows of one site", got=f"shapes {got}", expected=expected))
    return shapes[0]


class Damage(NamedTuple):
    """A capture, a shard, or a part of a shard that cannot be read. Readers leave it out.

    path: the file or directory.
    of_capture: whether exactly one capture is damaged.
    """

    path: PurePath
    error: CapflowError
    of_capture: bool


class RequestCapture(DerivedRows, Tabular, ABC):
    """One captured request; `capture[(12, "post_block")]` or `capture["post_block:12"]` gives a site's rows.

    path: the request's directory, or the shard that it is in.
    """

    def __init__(self, path: PurePath, sidecar: layout.Sidecar) -> None:
        self.path = path
        self.sidecar = sidecar
        self._entries = {entry.site: entry for entry in sidecar.sites}
        self._rounded = {entry.site: entry.quantization for entry in sidecar.sites if entry.quantization}

    def __repr__(self) -> str:
        about = f"{len(self.sites)} sites, {self.sidecar.rows} rows, {self.prompt_length} prompt tokens"
        return f"<capture {self.id!r}: {about}, {self.status}>"

    def _repr_html_(self) -> str:
        return capture_html(self)

    def to_arrow(self) -> pa.Table:
        """Return a table with a line for each row.

        Columns: `request`, `layer`, `hook`, `position`, `token_id`, and `row`, a list of float32. `to_pandas` and
        `to_polars` give the same.
        """
        return arrow_of([self])

    @property
    def id(self) -> str:
        """The request's id, as it was given."""
        return self.sidecar.request

    @property
    def engine(self) -> str:
        """The id of the engine that ran the request; `NAME@START` where the engine has a name."""
        return self.sidecar.engine

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that have rows, in order."""
        return tuple(sorted(self._entries))

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt."""
        return self.sidecar.prompt_length

    @property
    def computed_length(self) -> int:
        """The number of tokens that were computed. The last position that can have a row is `computed_length - 1`."""
        return self.sidecar.computed_length

    @property
    def status(self) -> str:
        """`ok` if every promised row is here, else `partial_error` or `error`; the error says what is missing."""
        return self.sidecar.capture_status

    @property
    def error(self) -> str | None:
        """Which rows are missing and why; None if no row is missing."""
        return self.sidecar.error

    @property
    def budget_reached(self) -> bool:
        """Whether the limit `max_rows` left out positions that the request asked for."""
        return self.sidecar.budget_reached

    @property
    def tag(self) -> str:
        """The tag of the request's spec; empty if it had none."""
        return self.sidecar.tag

    @property
    def adapter(self) -> str:
        """The name of the LoRA adapter that the request ran with; empty for none."""
        return self.sidecar.adapter

    @property
    def weights(self) -> tuple[Weights, ...]:
        """The weights that computed the rows, in order, each with its first position.

        Empty in data sets of earlier versions.
        """
        return tuple(self.sidecar.weights)

    @property
    def texts(self) -> dict[int, str]:
        """The text of each token whose text is known, by position."""
        return {run.start + i: text for run in self.sidecar.texts for i, text in enumerate(run.texts)}

    @property
    def events(self) -> tuple[layout.SteeringEvent, ...]:
        """The events of the request's steering, in order; none in data sets of earlier versions."""
        return tuple(self.sidecar.events)

    def steered(self, site: tuple[int, str] | str) -> npt.NDArray[np.bool_] | None:
        """Return whether each row's position was steered, `[n]`; None in data sets of earlier versions.

        Raises as `capture[site]` does.
        """
        return steered_at(self.sidecar, self.positions(site))

    def shape_of(self, site: tuple[int, str] | str) -> tuple[int, ...]:
        """Return the shape of a site's row: `(hidden_size,)`, or at `heads` `(heads, head_dim)`.

        Raises UsageError if the site has no rows.
        """
        return self._entry(site).row_shape(self.sidecar.hidden_size)

    def quantization_of(self, site: tuple[int, str] | str) -> layout.Quantization | None:
        """Return what a site's rows were rounded to; None if they are as they were captured.

        `sidecar.dtype` is the dtype in which they were captured. Raises UsageError if the site has no rows.
        """
        return self._rounded.get(self._entry(site).site)

    def rows_at(self, site: Site) -> int:
        """Return how many rows a site has according to the sidecar."""
        entry = self._entries.get(site)
        return entry.rows if entry is not None else 0

    def _forms(self, name: Literal["attention", "router"]) -> Mapping[Site, Any]:
        return {site: getattr(entry, name) for site, entry in self._entries.items()}

    def __contains__(self, site: object) -> bool:
        return site_named(site, self._entries) in self._entries

    def __getitem__(self, site: tuple[int, str] | str) -> Rows:
        """Return a site's rows, read-only. They are memory-mapped unless they are compressed or come in several parts.

        Rows that were rounded are float32; see `quantization_of`.

        Raises UsageError if the site has no rows, and CapflowError if they are damaged.
        """
        return self._rows(self._entry(site))

    def in_batches(self, site: tuple[int, str] | str) -> Iterator[Rows]:
        """Yield a site's rows in consecutive parts. Memory holds one part at a time.

        Raises as `capture[site]` does.
        """
        yield self[site]

    def positions(self, site: tuple[int, str] | str) -> npt.NDArray[np.int64]:
        """Return the positions `[n]` of a site's rows, without reading the rows; raises as `capture[site]` does."""
        return self[site].positions

    def _entry(self, site: tuple[int, str] | str) -> layout.SiteFile:
        """Return a site's entry in the sidecar; raises UsageError if it has none."""
        wanted = site_named(site, self._entries)
        entry = self._entries.get(wanted)
        if entry is None:
            have = ", ".join(map(str, self.sites)) or "none"
            problem = f"{self.path}: no rows at a site"
            raise UsageError(explain(problem, got=str(wanted), expected=f"one of {have}"))
        return entry

    @abstractmethod
    def _rows(self, entry: layout.SiteFile) -> Rows:
        """Return the rows of one of the sidecar's sites; raises CapflowError when they are damaged."""

    @abstractmethod
    def verify_rows(self) -> None:
        """Read and check every row; raise CapflowError naming the first file that is damaged."""

    def verify(self) -> None:
        """Check every row and position; raise CapflowError naming the first file or site that is damaged."""
        self.verify_rows()
        for site in self.sites:
            self.check_positions(site, self.positions(site))

    def check_positions(self, site: Site, positions: npt.NDArray[np.int64]) -> None:
        """Raise CapflowError unless the positions of a site's rows rise and are below the computed length.

        A request with the status `error` has no known length: its engine died before it reported one.
        """
        if not len(positions):
            return
        rises = not (positions[1:] <= positions[:-1]).any()
        ended = self.sidecar.status != "error"
        if rises and positions[0] >= 0 and (not ended or positions[-1] < self.computed_length):
            return
        expected = f"rising from 0 to below {self.computed_length}" if ended else "rising from 0"
        raise CapflowError(explain(f"positions of {site}", got=shown(positions), expected=expected))


class JoinedCapture(RequestCapture):
    """A request whose rows are spread over several captures; `path` is the path of the last one."""

    def __init__(self, parts: Sequence[RequestCapture]) -> None:
        self.parts = tuple(parts)
        super().__init__(parts[-1].path, _joined_sidecar([part.sidecar for part in parts]))

    def in_batches(self, site: tuple[int, str] | str) -> Iterator[Rows]:
        """Yield a site's rows part by part; in one piece if the positions of the parts interleave."""
        wanted = site_named(site, self._entries)
        ends = [(places[0], places[-1], part) for part in self._with(wanted) if len(places := part.positions(wanted))]
        ends.sort(key=itemgetter(0))
        if ends and all(last < first for (_, last, _), (first, _, _) in itertools.pairwise(ends)):
            for _, _, part in ends:
                yield from part.in_batches(wanted)
        else:
            yield self[wanted]

    def positions(self, site: tuple[int, str] | str) -> npt.NDArray[np.int64]:
        """Return the positions `[n]` of a site's rows, without reading the rows; raises as `capture[site]` does."""
        wanted = site_named(site, self._entries)
        positions = [part.positions(wanted) for part in self._with(wanted)]
        return np.sort(np.concatenate(positions)) if positions else super().positions(wanted)

    def _with(self, site: Site) -> list[RequestCapture]:
        return [part for part in self.parts if site in part]

    def _rows(self, entry: layout.SiteFile) -> Rows:
        parts = [part[entry.site] for part in self._with(entry.site)]
        if len(parts) == 1:
            return parts[0]
        whole = concatenated(parts)
        joined = whole.chosen(np.argsort(whole.positions, kind="stable"))
        for array in joined:
            array.flags.writeable = False
        return joined

    def verify_rows(self) -> None:
        """Verify the rows of each part."""
        for part in self.parts:
            part.verify_rows()


def joined(captures: Sequence[RequestCapture]) -> list[RequestCapture]:
    """Return the captures of one id; captures that are parts of one request are joined.

    A request has several parts if a worker sent rows after the hub had taken it for gone, or if several pipeline stages
    of an engine have different layers.
    """
    groups: list[list[RequestCapture]] = []
    # The latest group of each engine.
    latest: dict[str, list[RequestCapture]] = {}
    for capture in captures:
        group = latest.get(capture.engine)
        if group is not None and all(_belong(part.sidecar, capture.sidecar) for part in group):
            group.append(capture)
        else:
            latest[capture.engine] = [capture]
            groups.append(latest[capture.engine])
    return [group[0] if len(group) == 1 else JoinedCapture(group) for group in groups]


def steered_at(sidecar: layout.Sidecar, positions: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Return whether each of these positions of a request was steered; None if its sidecar does not say it."""
    if sidecar.steered is None:
        return None
    # A position inside a run has an odd number of edges at or before it.
    steered: npt.NDArray[np.bool_] = np.searchsorted(np.array(sidecar.steered, np.int64), positions, "right") % 2 == 1
    return steered


def damaged(file: PurePath, got: str, expected: str) -> CapflowError:
    """Return the error for a file whose content is not what was written."""
    return CapflowError(explain(str(file), got=got, expected=expected, do="restore it from a copy or capture it again"))


def _belong(first: layout.Sidecar, later: layout.Sidecar) -> bool:
    same = ("engine", "model", "dtype", "hidden_size", "prompt_length")
    if any(getattr(first, name) != getattr(later, name) for name in same):
        return False
    workers = [{(source.boot, source.rank) for source in sidecar.sources} for sidecar in (first, later)]
    if first.status == "error" and workers[0] & workers[1]:
        had = {entry.site: entry.rows for entry in first.sites}
        return all(had.get(e.site, 0) + e.rows <= (e.rows_expected or 0) for e in later.sites)
    stages = [{source.rank.pp for source in sidecar.sources} for sidecar in (first, later)]
    return first.computed_length == later.computed_length and all(stages) and not stages[0] & stages[1]


def _joined_sidecar(sidecars: Sequence[layout.Sidecar]) -> layout.Sidecar:
    """Join the sidecars of parts. The result is `ok` if each site has as many rows as a part expected of it."""
    sites: dict[Site, layout.SiteFile] = {}
    for entry in (entry for sidecar in sidecars for entry in sidecar.sites):
        had = sites.get(entry.site)
        sites[entry.site] = entry if had is None else _added(had, entry)
    last = sidecars[-1]
    dropped = [drop for sidecar in sidecars for drop in sidecar.dropped]
    whole = last.status != "error" and not dropped and all(e.rows == e.rows_expected for e in sites.values())
    errors = "; ".join(dict.fromkeys(sidecar.error for sidecar in sidecars if sidecar.error))
    texts = {run.start: run for sidecar in sidecars for run in sidecar.texts}
    events = {event.id: event for sidecar in sidecars for event in sidecar.events}
    return msgspec.structs.replace(
        last,
        capture_status="ok" if whole else "partial_error",
        error=None if whole else errors or None,
        dropped=dropped,
        rows=sum(sidecar.rows for sidecar in sidecars),
        sites=[sites[site] for site in sorted(sites)],
        texts=[texts[start] for start in sorted(texts)],
        sources=[source for sidecar in sidecars for source in sidecar.sources],
        steered=_joined_runs([sidecar.steered for sidecar in sidecars]),
        events=sorted(events.values(), key=lambda event: event.time_ns),
        events_lost=sum(sidecar.events_lost for sidecar in sidecars),
        weights=list(joined_weights(sidecar.weights for sidecar in sidecars)),
    )


def _joined_runs(parts: Sequence[list[int] | None]) -> list[int] | None:
    joined = Intervals()
    for runs in parts:
        if runs is None:
            return None
        for first, end in zip(runs[::2], runs[1::2], strict=True):
            joined.add(first, end - 1)
    return [edge for first, last in joined for edge in (first, last + 1)]


def _added(had: layout.SiteFile, entry: layout.SiteFile) -> layout.SiteFile:
    expected = None if entry.rows_expected is None else max(had.rows_expected or 0, entry.rows_expected)
    return msgspec.structs.replace(
        entry,
        rows=had.rows + entry.rows,
        rows_expected=expected,
        bytes=had.bytes + entry.bytes,
        xxh3_64="",
        rows_overflowed=had.rows_overflowed + entry.rows_overflowed,
        offset=0,
        quantization=entry.quantization or had.quantization,
    )
