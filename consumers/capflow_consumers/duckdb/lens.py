"""The lens of the duckdb consumer: the most likely tokens of each captured row, read as rows come.

Rows of all layers are gathered and read in one pass over the vocabulary, at most `limits.LENS_ROWS` at a time: a pass
reads the whole unembedding, however few its rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import HOOK_DEFAULT, Site
from capflow.capture.spec import CaptureSpec, Layers, read_layers
from capflow.errors import UsageError, explain
from capflow.lenses.file import LensFile
from capflow.lenses.lens import Lens, LensPart, LensReading, open_lens
from capflow.limits import MIB
from capflow_consumers.duckdb.request import Stretches
from capflow_consumers.duckdb.scoring import Rows

LOGIT = "logit"
"""The option's value for the logit lens, which has no file."""


class LensRecord(msgspec.Struct, frozen=True):
    """A line of the table `lenses`.

    digest: of the model's final norm and unembedding and of the lens file, in hexadecimal.
    """

    name: str
    kind: str
    model: str
    file: str
    digest: str


class LiveLens:
    """The lens that a consumer's options name, opened for the model of the first engine that it fits.

    given: a lens file, or `logit`.
    layers: those to read, in the forms of a capture.
    k: how many tokens of each row.
    other_weights: whether the file may be of other weights of the same sizes.
    where: the consumer, for errors: `consumers.duckdb`.

    Raises UsageError for a file that is no lens, and for layers of another form.
    """

    def __init__(self, given: str, layers: Layers, k: int, *, other_weights: bool, where: str) -> None:
        if not 0 < k <= limits.LENS_TOKENS_MAX:
            raise UsageError(explain(f"{where}.lens_tokens", got=k, expected=f"1..{limits.LENS_TOKENS_MAX}"))
        self.layers = read_layers(layers, f"{where}.lens_layers")
        self.k = k
        self._where = where
        self._other_weights = other_weights
        self._file: LensFile | None = None
        if given != LOGIT:
            try:
                self._file = LensFile(given)
            except UsageError as e:
                raise UsageError(f"{where}.lens: {e}") from e
        self._lens: Lens | None = None
        # The record of `_lens`.
        self._record: LensRecord | None = None
        self._sites: set[Site] = set()

    def fit(self, model: ModelInfo, check: Callable[[LensRecord], None]) -> None:
        """Open the lens for a model, or check that the model is that of the lens.

        check: raises UsageError if what the database would record cannot be.

        Raises UsageError if the lens does not fit the model, or its rows, and for a second model.
        """
        lens = open_lens(model.name, self._file, other_weights=self._other_weights)
        if lens.hidden_size != model.hidden_size or lens.num_layers < model.num_layers:
            # A data set names its captured layers only.
            got = f"{lens.num_layers} layers of width {lens.hidden_size}"
            expected = f"those of the engine's model: {model.num_layers} or more of width {model.hidden_size}"
            raise UsageError(explain(f"{self._where}.lens: {lens.directory}", got=got, expected=expected))
        spec = CaptureSpec({HOOK_DEFAULT: self.layers})
        sites = spec.resolve(model.sites, num_layers=model.num_layers, where=f"{self._where}.lens_layers")
        read = {site for site in sites if self.layers != "all" or lens.reads(site)}
        for site in sorted(read):
            lens.check(site)
        record = LensRecord(lens.name, lens.kind, model.name, self._name, self._digest_of(lens))
        if self._record is not None and self._record.digest != record.digest:
            got, do = f"a second model, {model.name}", "use a consumer and a database for each"
            raise UsageError(explain(f"{self._where}.lens", got=got, expected=self._record.model, do=do))
        check(record)
        self._lens, self._record = lens, record
        self._sites |= read

    @property
    def record(self) -> LensRecord | None:
        """What the database records; None before a model came."""
        return self._record

    @property
    def name(self) -> str:
        """The lens's name; only once a model came."""
        assert self._record is not None
        return self._record.name

    def layers_with(self, layers: Sequence[int]) -> Layers:
        """Return the layers to capture: its own and others."""
        return self.layers if isinstance(self.layers, str) else [*layers, *self.layers]

    def takes(self, site: Site) -> bool:
        """Return whether rows of a site are read."""
        return site in self._sites

    def read(self, parts: Sequence[LensPart]) -> list[LensReading]:
        """Return what the lens reads from parts of at most `limits.LENS_ROWS` rows together."""
        assert self._lens is not None
        return self._lens.read(parts, self.k)

    @property
    def _name(self) -> str:
        return "" if self._file is None else str(Path(self._file.where).absolute())

    def _digest_of(self, lens: Lens) -> str:
        return xxhash.xxh3_64_hexdigest(f"{lens.kind} {lens.fingerprint} {self._file_digest}".encode())

    @cached_property
    def _file_digest(self) -> str:
        digest = xxhash.xxh3_64()
        if self._file is not None:
            with Path(self._file.where).open("rb") as stream:
                while block := stream.read(MIB):
                    digest.update(block)
        return digest.hexdigest()


class LensRows:
    """The rows of a lens's sites since `clear`, and what it reads from them.

    working: called before each pass, which may take a while.
    """

    def __init__(self, lens: LiveLens, working: Callable[[], None]) -> None:
        self.lens = lens
        self._working = working
        self._stretches: dict[Site, list[Stretches]] = {}
        self._readings: dict[Site, list[LensReading]] = {}
        # Rows that are not read yet, as float32, by site.
        self._waiting: dict[Site, list[Rows]] = {}
        self._count = 0

    def add(self, site: Site, stretches: Stretches, rows: Rows) -> None:
        """Copy rows `[n, hidden_size]`: those of the stretches."""
        self._stretches.setdefault(site, []).append(stretches)
        self._waiting.setdefault(site, []).append(rows.astype(np.float32))
        self._count += len(rows)

    def read_full(self) -> None:
        """Read the rows that wait if they fill a pass."""
        if self._count >= limits.LENS_ROWS:
            self._read()

    def tokens(self) -> Iterator[tuple[Site, list[Stretches], list[LensReading]]]:
        """Yield, for each site, its stretches and what the lens reads from all their rows, in their order."""
        self._read()
        for site, stretches in self._stretches.items():
            yield site, stretches, self._readings[site]

    def clear(self) -> None:
        """Drop all rows and readings."""
        self._stretches, self._readings, self._waiting, self._count = {}, {}, {}, 0

    def _read(self) -> None:
        readings: list[tuple[Site, LensReading]] = []
        for parts in _passes(self._waiting):
            self._working()
            readings += [(part.site, each) for part, each in zip(parts, self.lens.read(parts), strict=True)]
        # After a failure all rows still wait.
        self._waiting, self._count = {}, 0
        for site, reading in readings:
            self._readings.setdefault(site, []).append(reading)


def _passes(waiting: Mapping[Site, Sequence[Rows]]) -> Iterator[list[LensPart]]:
    """Yield the rows of all sites, `limits.LENS_ROWS` at a time; those of one site stay in order."""
    parts: list[LensPart] = []
    room = limits.LENS_ROWS
    for site, several in waiting.items():
        rows = np.concatenate(several)
        while len(rows):
            parts.append(LensPart(site, rows[:room]))
            rows, room = rows[room:], room - len(parts[-1].rows)
            if not room:
                yield parts
                parts, room = [], limits.LENS_ROWS
    if parts:
        yield parts
