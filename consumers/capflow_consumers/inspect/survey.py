"""The survey of a captured data set: its requests, models, sites and norms, its damage and its missing rows.

Damage is a result, not an error: damaged captures are listed and left out of the norms.

Invariant: memory does not grow with the data set. One request is read at a time, and its rows in batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import PurePath

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.errors import CapflowError, RetryError
from capflow_consumers.dataset.contents import in_order
from capflow_consumers.dataset.reader import Damage, Dataset, RequestCapture, Rows
from capflow_consumers.dataset.rows import shown
from capflow_consumers.inspect.norms import NormStats

LISTED_MAX = 100
"""How many damages and gaps are listed; all are counted."""


class SiteSurvey(msgspec.Struct):
    """One site over all captures.

    captures: captures with rows of the site.
    rows_missing: expected rows that are not stored.
    bytes: size of the rows, as they are stored.
    quantizations: what some of the rows were rounded to.
    hidden_sizes: the widths of the rows.
    shapes: the shapes of a row.
    norm_mean, norm_median, norm_min, norm_max: None without a finite norm.
    rows_not_finite: rows with a number that is not finite.
    """

    site: str
    captures: int = 0
    rows: int = 0
    rows_missing: int = 0
    bytes: int = 0
    dtypes: list[str] = []
    quantizations: list[str] = []
    hidden_sizes: list[int] = []
    shapes: list[tuple[int, ...]] = []
    norm_mean: float | None = None
    norm_median: float | None = None
    norm_min: float | None = None
    norm_max: float | None = None
    rows_not_finite: int = 0


class CaptureGap(msgspec.Struct, frozen=True):
    """The missing rows of one capture.

    missing: by site, the missing positions as `first..last`; if they are unknown, how many rows.
    dropped: dropped rows by reason.
    """

    request: str
    status: str
    error: str | None
    missing: dict[str, str]
    dropped: dict[str, int]


class Survey(msgspec.Struct):
    """The contents of a data set.

    checked: whether rows were read. If not, there are no norms, and only damage to sidecars is found.
    captures: all captures, also those with unreadable sidecars.
    bytes: size of the rows, as they are stored.
    bytes_on_disk: size of every file below the root.
    positions: the last position with a row, plus one.
    models: captures by model.
    ended: captures by how the request ended.
    statuses: captures by `capture_status`.
    captures_damaged: captures with damage, and shards with damage outside of any capture.
    damaged: a line for each damage, at most `LISTED_MAX`.
    captures_with_gaps: captures that lack rows or whose status is not `ok`.
    dropped: dropped rows by reason.
    gaps: at most `LISTED_MAX`.
    captures_steered: captures with a steered position.
    positions_steered: steered positions, over all captures.
    events: events of steering by kind.
    """

    path: str
    checked: bool
    captures: int = 0
    rows: int = 0
    bytes: int = 0
    bytes_on_disk: int = 0
    prompt_tokens: int = 0
    positions: int = 0
    models: dict[str, int] = {}
    ended: dict[str, int] = {}
    statuses: dict[str, int] = {}
    sites: list[SiteSurvey] = []
    captures_damaged: int = 0
    damaged: list[str] = []
    captures_with_gaps: int = 0
    rows_missing: int = 0
    dropped: dict[str, int] = {}
    gaps: list[CaptureGap] = []
    captures_steered: int = 0
    positions_steered: int = 0
    events: dict[str, int] = {}


class Surveyor:
    """Surveys a data set.

    check: whether to read rows.
    norms: the norms of each site, complete once `survey` returns.
    """

    def __init__(self, dataset: Dataset, *, check: bool = True) -> None:
        self.norms: dict[Site, NormStats] = {}
        self._dataset = dataset
        self._survey = Survey(str(dataset.path), check)
        self._sites: dict[Site, SiteSurvey] = {}
        self._models: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._damaged: set[PurePath] = set()

    def survey(self, on_capture: Callable[[], object] = lambda: None) -> Survey:
        """Read every capture; return the survey.

        on_capture: called after each capture.
        """
        survey = self._survey
        for capture in self._dataset.walk():
            if isinstance(capture, Damage):
                survey.captures += capture.of_capture
                self._damage(str(capture.error), capture.path)
            else:
                self._look(capture)
            on_capture()
        for damage in self._dataset.verify_shards() if survey.checked else ():
            # Damage that no capture has shown.
            if damage.path not in self._damaged:
                self._damage(str(damage.error), damage.path)
        survey.bytes_on_disk = self._dataset.nbytes
        for counts, name in (
            (self._models, "models"),
            (self._ended, "ended"),
            (self._statuses, "statuses"),
            (self._dropped, "dropped"),
            (self._events, "events"),
        ):
            setattr(survey, name, dict(counts.most_common()))
        survey.sites = [self._sites[site] for site in in_order(self._sites)]
        for site, norms in self.norms.items():
            _set_norms(self._sites[site], norms)
        return survey

    def _look(self, capture: RequestCapture) -> None:
        survey, sidecar = self._survey, capture.sidecar
        survey.captures += 1
        survey.prompt_tokens += capture.prompt_length
        self._models[sidecar.model or "unknown"] += 1
        self._ended[sidecar.status] += 1
        self._statuses[capture.status] += 1
        self._events.update(event.kind for event in capture.events)
        runs = sidecar.steered or ()
        survey.captures_steered += bool(runs)
        survey.positions_steered += sum(runs[1::2]) - sum(runs[::2])
        try:
            if survey.checked:
                capture.verify()
            positions = {site: self._look_at(capture, site) for site in capture.sites}
        except RetryError:  # an object store that is away is no damage
            raise
        except CapflowError as e:
            self._damage(f"request {capture.id!r}: {e}", capture.path)
            return
        self._look_for_gaps(capture, positions)

    def _look_at(self, capture: RequestCapture, site: Site) -> npt.NDArray[np.int64]:
        """Count the rows of a site and add their norms; return their positions."""
        every = np.zeros(0, np.int64)
        for part in capture.in_batches(site):
            every = np.concatenate([every, part.positions])
            capture.check_positions(site, every)
            self._count(site, part, capture.quantization_of(site))
        self._sites[site].captures += 1
        return every

    def _count(self, site: Site, part: Rows, quantization: str | None) -> None:
        rows, positions, _ = part
        entry, survey = self._sites.setdefault(site, SiteSurvey(str(site))), self._survey
        entry.rows += len(rows)
        nbytes = (
            rows.nbytes if quantization is None else len(rows) * (rows.shape[1] + 4)
        )  # a byte a number, and a float32 scale
        entry.bytes += nbytes
        entry.dtypes = sorted({*entry.dtypes, rows.dtype.name})
        entry.quantizations = sorted({*entry.quantizations, *filter(None, [quantization])})
        entry.hidden_sizes = sorted({*entry.hidden_sizes, rows.shape[1]})
        entry.shapes = sorted({*entry.shapes, part.row_shape})
        survey.rows += len(rows)
        survey.bytes += nbytes
        if len(positions):
            survey.positions = max(survey.positions, int(positions[-1]) + 1)
        if survey.checked:
            self.norms.setdefault(site, NormStats()).add(rows, positions)

    def _look_for_gaps(self, capture: RequestCapture, positions: dict[Site, npt.NDArray[np.int64]]) -> None:
        dropped: Counter[str] = Counter()
        for rows, reason in capture.sidecar.dropped:
            dropped[reason] += rows
        missing = {}
        every: npt.NDArray[np.int64] | None = None
        for entry in capture.sidecar.sites:
            lacks = (entry.rows_expected or 0) - entry.rows
            if lacks > 0:
                if every is None:
                    every = np.unique(np.concatenate(list(positions.values())))
                absent = np.setdiff1d(every, positions[entry.site])
                missing[str(entry.site)] = shown(absent) if len(absent) == lacks else f"{lacks} rows"
                self._sites[entry.site].rows_missing += lacks
                self._survey.rows_missing += lacks
        self._dropped.update(dropped)
        if missing or dropped or capture.status != "ok":
            self._survey.captures_with_gaps += 1
            if len(self._survey.gaps) < LISTED_MAX:
                self._survey.gaps.append(CaptureGap(capture.id, capture.status, capture.error, missing, dict(dropped)))

    def _damage(self, line: str, path: PurePath) -> None:
        self._damaged.add(path)
        self._survey.captures_damaged += 1
        if len(self._survey.damaged) < LISTED_MAX:
            self._survey.damaged.append(line)


def _set_norms(entry: SiteSurvey, norms: NormStats) -> None:
    entry.rows_not_finite = norms.rows_not_finite
    if norms.rows > norms.rows_not_finite:
        entry.norm_mean, entry.norm_median = norms.mean, norms.median
        entry.norm_min, entry.norm_max = norms.min, norms.max
