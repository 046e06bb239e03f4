"""What a captured data set holds: requests, models, sites, norms, and what of it is damaged or missing.

What always holds: one request is looked at after another, and of its rows a part at a time, so that memory does not grow with the
data set. Damage is a finding, not an error: what is damaged is named, and left out of the norms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow_consumers.dataset.capture import shown
from capflow_consumers.dataset.contents import in_order
from capflow_consumers.dataset.reader import Damage, Dataset, RequestCapture, Rows
from capflow_consumers.inspect.norms import NormStats

LISTED_MAX = 100
"""How many damages and gaps are told of one by one; all are counted."""


class SiteSurvey(msgspec.Struct):
    """One site over all captures.

    rows_missing: of those that were promised. norm_*: of its rows, None without rows. shape: `[rows, hidden_size]`.
    """

    site: str
    captures: int = 0
    rows: int = 0
    rows_missing: int = 0
    bytes: int = 0
    dtypes: list[str] = []
    hidden_sizes: list[int] = []
    norm_mean: float | None = None
    norm_median: float | None = None
    norm_min: float | None = None
    norm_max: float | None = None
    rows_not_finite: int = 0


class CaptureGap(msgspec.Struct, frozen=True):
    """What one capture lacks.

    missing: by site, positions as `first..last` where they can be told, else how many rows.
    dropped: rows by reason.
    """

    request: str
    status: str
    error: str | None
    missing: dict[str, str]
    dropped: dict[str, int]


class Survey(msgspec.Struct):
    """What a data set holds.

    captures: also those whose sidecars cannot be read.
    captures_damaged: these, those with other damage, and shards with damage that is no capture's.
    bytes: of rows.
    bytes_on_disk: of every file below the root.
    models: captures by model.
    ended: captures by how the request ended.
    statuses: captures by whether all rows are here.
    positions: one more than the last that has a row.
    damaged: what could not be read, or is not what was written.
    checked: whether rows were read; without, there are no norms, and only damage to what describes them is found.
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


class Surveyor:
    """Looks through a data set; `survey()` is what it found and `norms` the norms of each site."""

    def __init__(self, dataset: Dataset, *, check: bool = True) -> None:
        self.norms: dict[Site, NormStats] = {}
        self._dataset = dataset
        self._survey = Survey(str(dataset.path), check)
        self._sites: dict[Site, SiteSurvey] = {}
        self._models: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._damaged: set[Path] = set()

    def survey(self, on_capture: Callable[[], object] = lambda: None) -> Survey:
        """Look at every capture, and return what was found.

        on_capture: called after each.
        """
        found = self._survey
        for capture in self._dataset.walk():
            if isinstance(capture, Damage):
                found.captures += capture.of_capture
                self._damage(str(capture.error), capture.path)
            else:
                self._look(capture)
            on_capture()
        for damage in self._dataset.verify_shards() if found.checked else ():
            if damage.path not in self._damaged:  # in what no capture is read from
                self._damage(str(damage.error), damage.path)
        found.bytes_on_disk = _size(self._dataset.path)
        for counts, name in (
            (self._models, "models"),
            (self._ended, "ended"),
            (self._statuses, "statuses"),
            (self._dropped, "dropped"),
        ):
            setattr(found, name, dict(counts.most_common()))
        found.sites = [self._sites[site] for site in in_order(self._sites)]
        for site, norms in self.norms.items():
            _tell_norms(self._sites[site], norms)
        return found

    def _look(self, capture: RequestCapture) -> None:
        found, sidecar = self._survey, capture.sidecar
        found.captures += 1
        found.prompt_tokens += capture.prompt_length
        self._models[sidecar.model or "unknown"] += 1
        self._ended[sidecar.status] += 1
        self._statuses[capture.status] += 1
        try:
            if found.checked:
                capture.verify()
            positions = {site: self._look_at(capture, site) for site in capture.sites}
        except CapflowError as e:
            self._damage(f"request {capture.id!r}: {e}", capture.path)
            return
        self._look_for_gaps(capture, positions)

    def _look_at(self, capture: RequestCapture, site: Site) -> npt.NDArray[np.int64]:
        """Count and measure the rows of a site; return their positions."""
        every = np.zeros(0, np.int64)
        for part in capture.in_batches(site):
            every = np.concatenate([every, part.positions])
            capture.check_positions(site, every)
            self._count(site, part)
        self._sites[site].captures += 1
        return every

    def _count(self, site: Site, part: Rows) -> None:
        rows, positions, _ = part
        told, found = self._sites.setdefault(site, SiteSurvey(str(site))), self._survey
        told.rows += len(rows)
        told.bytes += rows.nbytes
        told.dtypes = sorted({*told.dtypes, rows.dtype.name})
        told.hidden_sizes = sorted({*told.hidden_sizes, rows.shape[1]})
        found.rows += len(rows)
        found.bytes += rows.nbytes
        if len(positions):
            found.positions = max(found.positions, int(positions[-1]) + 1)
        if found.checked:
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

    def _damage(self, what: str, path: Path) -> None:
        self._damaged.add(path)
        self._survey.captures_damaged += 1
        if len(self._survey.damaged) < LISTED_MAX:
            self._survey.damaged.append(what)


def _tell_norms(told: SiteSurvey, norms: NormStats) -> None:
    told.rows_not_finite = norms.rows_not_finite
    if norms.rows > norms.rows_not_finite:
        told.norm_mean, told.norm_median = norms.mean, norms.median
        told.norm_min, told.norm_max = norms.min, norms.max


def _size(root: Path) -> int:
    return sum(_sizes(root))


def _sizes(directory: Path) -> Iterator[int]:
    """Yield the sizes of the files below a directory; what goes away meanwhile has none."""
    try:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from _sizes(path)
            else:
                yield path.lstat().st_size
    except OSError:
        return
