"""Exports a data set as the cached activations that SAELens trains on: a Hugging Face data set for each site.

`datasets.load_from_disk` opens DEST/`blocks.12.hook_resid_post`, and SAELens takes it as `cached_activations_path`. The
format is that of SAELens' `CacheActivationsRunner`. A line is one context: a column with the hook's name, `Array2D`
`[context_size, width]`, and a column `token_ids`, int32 `[context_size]`.

The rows of a site fill one context after another, in the order of requests and positions. Rows at the end that do not
fill a context are not written. The format has no place for which rows were steered; they can be left out. Rows are
float32, or float16 if all rows were stored as float16. Arrow has no bfloat16; float32 holds every bfloat16 number
exactly.

Needs `datasets`, which the extra `saelens` installs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow_consumers.dataset.contents import SiteContents, one_width
from capflow_consumers.dataset.reader import Dataset
from capflow_consumers.export.destination import Destination
from capflow_consumers.export.selection import selected

_BATCH_BYTES = 8 << 20
_FILE_BYTES = 500 << 20


class ExportedSite(NamedTuple):
    """One exported site; SAELens needs its `hook_name`, `d_in` and `dtype`.

    d_in: numbers of a row.
    rows_left: rows that did not fill a context.
    """

    hook_name: str
    d_in: int
    dtype: str
    contexts: int
    rows_left: int


def check_fits(sites: dict[Site, SiteContents], context_size: int) -> None:
    """Raise UsageError when a site has rows of several widths, or fewer rows than one context."""
    for site, contents in sites.items():
        one_width({site: contents})
        if contents.rows < context_size:
            expected, do = f"a context of {context_size}", f"--context-size {contents.rows} or less"
            raise UsageError(explain(f"rows at {site}", got=contents.rows, expected=expected, do=do))


def to_saelens(
    dataset: Dataset,
    sites: dict[Site, SiteContents],
    destination: Destination,
    context_size: int,
    on_capture: Callable[[], object],
    *,
    unsteered: bool = False,
) -> Iterator[ExportedSite]:
    """Write a data set for each site that has none yet; yield the sites that were written.

    sites: with the number of rows that are written.
    on_capture: called after each capture of each site.
    unsteered: whether rows at steered positions are left out.
    """
    check_fits(sites, context_size)
    for site, contents in sites.items():
        if not destination.has(site.transformer_lens_name):
            yield _write(dataset, site, contents, destination, context_size, on_capture, unsteered=unsteered)


def _write(
    dataset: Dataset,
    site: Site,
    contents: SiteContents,
    destination: Destination,
    context_size: int,
    on_capture: Callable[[], object],
    *,
    unsteered: bool,
) -> ExportedSite:
    name, width = site.transformer_lens_name, one_width({site: contents})
    dtype = "float16" if contents.dtypes == {"float16"} else "float32"
    with destination.writing(name) as directory:
        directory.mkdir()
        writer = _Writer(directory, name, context_size, width, dtype)
        size = max(1, _BATCH_BYTES // (context_size * width * np.dtype(dtype).itemsize)) * context_size
        rows, token_ids = np.empty((size, width), dtype), np.empty(size, np.int32)
        filled = 0
        for capture in dataset:
            if site not in capture:
                on_capture()
                continue
            for batch in selected(capture, site, unsteered=unsteered):
                taken = 0
                while taken < len(batch.rows):
                    count = min(len(batch.rows) - taken, size - filled)
                    rows[filled : filled + count] = batch.rows[taken : taken + count]
                    token_ids[filled : filled + count] = batch.token_ids[taken : taken + count]
                    filled, taken = filled + count, taken + count
                    if filled == size:
                        writer.add(rows, token_ids)
                        filled = 0
            on_capture()
        left = filled % context_size
        writer.add(rows[: filled - left], token_ids[: filled - left])
        writer.close()
    return ExportedSite(name, width, dtype, writer.contexts, left)


class _Writer:
    """Writes a Hugging Face data set to a directory, in files of about `_FILE_BYTES`."""

    def __init__(self, directory: Path, name: str, context_size: int, width: int, dtype: str) -> None:
        import datasets

        features: dict[str, Any] = {
            name: datasets.Array2D((context_size, width), dtype),
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=context_size),
        }
        self._info = datasets.DatasetInfo(features=datasets.Features(features))
        self._schema = self._info.features.arrow_schema
        self._directory = directory
        self._shape = context_size, width
        self.contexts = 0
        self._files = 0
        self._file_bytes = 0
        self._stream: Any = None

    def add(self, rows: npt.NDArray[Any], token_ids: npt.NDArray[np.int32]) -> None:
        """Write rows `[contexts * context_size, width]` and their token ids."""
        import pyarrow as pa

        size, width = self._shape
        contexts = len(rows) // size
        if not contexts:
            return
        inner = pa.ListArray.from_arrays(_offsets(len(rows), width), pa.array(rows.reshape(-1)))
        outer = pa.ListArray.from_arrays(_offsets(contexts, size), inner)
        tokens = pa.FixedSizeListArray.from_arrays(pa.array(token_ids), size)
        columns = [self._schema.field(0).type.wrap_array(outer), tokens.cast(self._schema.field(1).type)]
        if self._stream is None or self._file_bytes >= _FILE_BYTES:
            self._next_file()
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._file_bytes += rows.nbytes
        self.contexts += contexts

    def close(self) -> None:
        """Name the files, and write the description that `datasets.load_from_disk` reads first."""
        self._stream.close()
        names = [f"data-{number:05d}-of-{self._files:05d}.arrow" for number in range(self._files)]
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / name)
        self._info.write_to_directory(str(self._directory))
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": None,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._directory / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")

    def _next_file(self) -> None:
        import pyarrow as pa

        if self._stream is not None:
            self._stream.close()
        self._stream = pa.ipc.new_stream(str(self._path(self._files)), self._schema)
        self._files += 1
        self._file_bytes = 0

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.arrow"


def _offsets(count: int, size: int) -> npt.NDArray[np.int32]:
    return np.arange(0, count * size + 1, size, dtype=np.int32)
