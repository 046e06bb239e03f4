"""The lens of a model: which tokens its rows would predict if the model ended at their layer.

`open_lens` opens one; it reads the model's own files on this machine, and no weights of its blocks. Logits are computed
in float32 from the weights as the files have them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import HOOK_DEFAULT, Site
from capflow.errors import UsageError, explain
from capflow.lenses.file import LensFile, blocks_before
from capflow.lenses.model_files import ModelFiles, open_model
from capflow.lenses.readout import Doubles, Floats, Ids
from capflow.lenses.unembedding import Unembedding
from capflow.lenses.vocabulary import Vocabulary
from capflow.text.brief import brief

SiteLike = Site | tuple[int, str] | str | int
"""A site, `(layer, hook)`, `"hook:layer"`, or the number of a layer for its `post_block`."""


class LensReading(NamedTuple):
    """What a lens reads from rows `[n, hidden_size]` of one site.

    ids: `[n, k]` int64, the most likely tokens first, and of two equal ones that with the lower id; -1 for a row that
        holds NaN or infinity.
    logits: `[n, k]` float32, after the model's scales and caps.
    probabilities: `[n, k]` float64, of the softmax over the whole vocabulary.
    texts: the text of each of these; None where the model's files do not say it.
    token_ids: `[n]` int64, the chosen tokens; -1 for none.
    token_ranks: `[n]` int64, their ranks: 1 for the most likely token, 0 for no token.
    token_logits, token_probabilities: `[n]`, NaN for no token.
    divergences: `[n]` float64, in nats: the Kullback-Leibler divergence of the lens from the last layer's prediction,
        KL(last layer ‖ lens); NaN where the last layer's row is not there.
    """

    ids: Ids
    logits: Floats
    probabilities: Doubles
    texts: list[list[str | None]]
    token_ids: Ids
    token_ranks: Ids
    token_logits: Floats
    token_probabilities: Doubles
    divergences: Doubles

    def __repr__(self) -> str:
        return brief(self)


class LensPart(NamedTuple):
    """Rows of one site in a pass over the vocabulary.

    rows: `[n, hidden_size]`.
    tokens: the chosen tokens `[n]`, -1 for none; None for none at all.
    last: for each row the index of the same position's row in the part of the last layer, -1 for none; None for none
        at all.
    """

    site: Site
    rows: npt.NDArray[Any]
    tokens: Ids | None = None
    last: Ids | None = None


class Lens:
    """A lens of a model. One thread may use it at a time.

    name: `logit`, or the name of the lens file without its suffix.
    kind: `logit`, `tuned` or `jacobian`.
    title: the kind, for people.
    num_layers, hidden_size, vocabulary_size: the model's sizes.

    Raises UsageError if the model's files or the lens file cannot be used, and for a lens of another model.
    """

    def __init__(self, files: ModelFiles, file: LensFile | None = None, *, other_weights: bool = False) -> None:
        self.directory = files.directory
        self._unembedding = Unembedding(files)
        self._file = file
        self.num_layers = self._unembedding.num_layers
        self.hidden_size = self._unembedding.hidden_size
        self.vocabulary_size = self._unembedding.vocabulary_size
        self.name = "logit" if file is None else file.stem
        self.kind = "logit" if file is None else file.origin.kind
        self.title = "Logit lens" if file is None else file.title
        if file is not None:
            self._check_origin(file, other_weights=other_weights)

    def __repr__(self) -> str:
        return f"<{self.title.lower()} {self.name!r} of {str(self.directory)!r}: {self.num_layers} layers>"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of the tokens. Raises UsageError if the file that has them is damaged."""
        return Vocabulary(self.directory)

    @property
    def fingerprint(self) -> str:
        """A hash of the model's final norm and unembedding: other weights have another one."""
        return self._unembedding.fingerprint

    @property
    def last(self) -> Site:
        """The last layer's `post_block`, whose lens is the model's own prediction."""
        return Site(self.num_layers - 1, HOOK_DEFAULT)

    def reads(self, site: SiteLike) -> bool:
        """Return whether the lens reads rows of a site."""
        try:
            self.check(site)
        except UsageError:
            return False
        return True

    def check(self, site: SiteLike) -> Site:
        """Return a site. Raises UsageError if the lens does not read its rows."""
        place = _site(site)
        blocks = blocks_before(place)
        if not 0 <= place.layer < self.num_layers:
            raise UsageError(explain("lens: layer", got=place.layer, expected=f"0..{self.num_layers - 1}"))
        if self._file is not None and blocks not in self._file.blocks and blocks != self.num_layers:
            sites = [str(_after(each)) for each in sorted(self._file.blocks)]
            shown = ", ".join(sites[:4]) + (f" … {sites[-1]}" if len(sites) > 4 else "")
            raise UsageError(explain(f"{self._file.where}: rows", got=str(place), expected=f"one of {shown}"))
        return place

    def top(
        self,
        rows: npt.ArrayLike,
        site: SiteLike,
        k: int = 5,
        *,
        token: int | str | npt.ArrayLike | None = None,
        last: npt.ArrayLike | None = None,
    ) -> LensReading:
        """Return the `k` most likely tokens of rows.

        rows: `[n, hidden_size]`, or one row; of any dtype that NumPy has, or bfloat16.
        token: a token whose rank and probability are wanted: its id or its text; or an id for each row, `[n]`.
        last: the rows of the same positions after the last block, `[n, hidden_size]`, for the divergence.

        Raises UsageError for rows of another width, a site that the lens does not read, and an unknown token.
        """
        place = self.check(site)
        array = self._rows(rows)
        reference = None if last is None else self._rows(last)
        if reference is not None and reference.shape != array.shape:
            raise UsageError(explain("lens: last", got=f"{len(reference)} rows", expected=f"{len(array)}"))
        if place == self.last:
            reference = array
        ids = None if token is None else self._tokens(token, len(array))
        step = limits.LENS_ROWS // (1 if reference is None else 2)
        readings = []
        for first in range(0, max(1, len(array)), step):
            part = slice(first, first + step)
            count = len(array[part])
            of_last = None if reference is None else np.arange(count)
            parts = [LensPart(place, array[part], None if ids is None else ids[part], of_last)]
            if reference is not None and place != self.last:
                parts.append(LensPart(self.last, reference[part]))
            readings.append(self.read(parts, k)[0])
        return _joined(readings)

    def by_site(
        self, rows: Mapping[Any, npt.ArrayLike], k: int = 5, *, token: int | str | npt.ArrayLike | None = None
    ) -> dict[Site, LensReading]:
        """Return the `k` most likely tokens at several sites, with the divergence if the last layer is one of them.

        rows: by site, `[n, hidden_size]` of the same positions.

        Raises as `top` does.
        """
        arrays = {self.check(site): self._rows(value) for site, value in rows.items()}
        counts = {len(array) for array in arrays.values()}
        if len(counts) != 1:
            got = " and ".join(map(str, sorted(counts))) or "no"
            raise UsageError(explain("lens: rows", got=f"{got} rows", expected="as many rows at each site"))
        (count,) = counts
        ids = None if token is None else self._tokens(token, count)
        step = max(1, limits.LENS_ROWS // len(arrays))
        readings: dict[Site, list[LensReading]] = {site: [] for site in arrays}
        for first in range(0, max(1, count), step):
            part = slice(first, first + step)
            last = np.arange(len(range(count)[part])) if self.last in arrays else None
            parts = [
                LensPart(site, array[part], None if ids is None else ids[part], last) for site, array in arrays.items()
            ]
            for site, reading in zip(arrays, self.read(parts, k), strict=True):
                readings[site].append(reading)
        return {site: _joined(each) for site, each in readings.items()}

    def token(self, text: str) -> int:
        """Return the id of the token with a text; `#17` is the token 17.

        Raises UsageError if no token has the text, or several have it.
        """
        if text.startswith("#") and text[1:].isdecimal() and len(text) < 12:
            return self._token(int(text[1:]))
        ids = self.vocabulary.ids(text)
        if len(ids) == 1:
            return ids[0]
        others = [spaced for spaced in (f" {text}", text.strip()) if spaced != text and self.vocabulary.ids(spaced)]
        do = f"try {others[0]!r}" if others else "give the id of a token as #ID"
        got = f"{text!r}, which is {'no token' if not ids else ' and '.join(f'#{each}' for each in ids[:4])}"
        raise UsageError(explain("token", got=got, expected="the text of one token", do=do))

    def read(self, parts: Sequence[LensPart], k: int) -> list[LensReading]:
        """Return a reading for each part, in one pass over the vocabulary. Memory grows with the number of rows.

        The sites must have been checked, and rows have the model's width.
        """
        if not 1 <= k <= limits.LENS_TOKENS_MAX:
            raise UsageError(explain("k", got=k, expected=f"1..{limits.LENS_TOKENS_MAX}"))
        starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        stream = np.concatenate([self._translated(part) for part in parts])
        tokens = _stacked([part.tokens for part in parts], parts)
        of_last = next((start for part, start in zip(parts, starts, strict=False) if part.site == self.last), None)
        last, references = _stacked([part.last for part in parts], parts), None
        if last is not None:
            assert of_last is not None
            last = np.where(last < 0, -1, last + of_last)
            # Rows of the last layer are their own references, so that their divergence is 0 without rounding.
            are_last = np.repeat([part.site == self.last for part in parts], np.diff(starts))
            references = np.where((last < 0) | are_last, np.arange(len(stream)), last)
        unembedded = self._unembedding.read(
            stream,
            k,
            tokens=None if tokens is None else np.maximum(tokens, 0),
            references=references,
        )
        broken = unembedded.top.ids[:, 0] < 0
        chosen = np.full(len(stream), -1, np.int64) if tokens is None else tokens
        ranks = np.zeros(len(stream), np.int64)
        odds, logits, kl = (np.full(len(stream), np.nan) for _ in range(3))
        if unembedded.chosen is not None:
            there = (chosen >= 0) & ~broken
            ranks[there] = unembedded.chosen.ranks[there]
            odds[there], logits[there] = unembedded.chosen.probabilities[there], unembedded.chosen.logits[there]
        if unembedded.divergences is not None and last is not None:
            there = (last >= 0) & ~broken & ~broken[np.maximum(last, 0)]
            kl[there] = unembedded.divergences[there]
        ids, top, probabilities = unembedded.top
        top[broken], probabilities[broken] = np.nan, np.nan
        readings = []
        for start, end in itertools.pairwise(starts.tolist()):
            part = slice(start, end)
            texts = [[self.vocabulary.text(token) for token in row] for row in ids[part].tolist()]
            about = (chosen[part], ranks[part], logits[part].astype(np.float32), odds[part], kl[part])
            readings.append(LensReading(ids[part], top[part], probabilities[part], texts, *about))
        return readings

    def _translated(self, part: LensPart) -> Doubles:
        blocks = blocks_before(part.site)
        if self._file is None or blocks not in self._file.blocks:
            stream: Doubles = part.rows.astype(np.float64)
            return stream
        return self._file.translated(part.rows, blocks)

    def _rows(self, rows: npt.ArrayLike) -> npt.NDArray[Any]:
        try:
            array = np.asarray(rows)
        # A tensor of torch whose dtype NumPy has not, or on a GPU.
        except (TypeError, ValueError, RuntimeError) as e:
            do = "give an array, such as tensor.float().cpu().numpy()"
            raise UsageError(explain("lens: rows", got=f"{type(rows).__name__}: {e}", do=do)) from e
        if array.dtype.kind not in "fiuV":
            raise UsageError(explain("lens: rows", got=f"dtype {array.dtype}", expected="numbers"))
        if array.ndim == 1:
            array = array[None]
        if array.ndim != 2 or array.shape[1] != self.hidden_size:
            got, expected = f"shape {list(array.shape)}", f"[n, {self.hidden_size}], as the model"
            raise UsageError(explain("lens: rows", got=got, expected=expected))
        return array

    def _tokens(self, token: int | str | npt.ArrayLike, count: int) -> Ids:
        if isinstance(token, str):
            token = self.token(token)
        ids = np.asarray(token)
        if ids.dtype.kind not in "iu" or ids.shape not in ((), (count,)):
            raise UsageError(explain("token", got=token, expected=f"a text, an id, or {count} ids"))
        for each in np.unique(ids).tolist():
            if each != -1:
                self._token(each)
        whole: Ids = np.broadcast_to(ids, (count,)).astype(np.int64)
        return whole

    def _token(self, token: int) -> int:
        if not 0 <= token < self.vocabulary_size:
            raise UsageError(explain("token", got=token, expected=f"0..{self.vocabulary_size - 1}"))
        return token

    def _check_origin(self, file: LensFile, *, other_weights: bool) -> None:
        origin = file.origin
        own = {"num_layers": self.num_layers, "hidden_size": self.hidden_size, "vocabulary_size": self.vocabulary_size}
        for field, expected in own.items():
            got = getattr(origin, field)
            if got != expected and not (field == "vocabulary_size" and not got):
                got = f"a lens with {field} {got}{_of(origin.model)}"
                raise UsageError(explain(file.where, got=got, expected=f"{expected}, as {self.directory}"))
        if other_weights or not origin.fingerprint:
            return
        if (fingerprint := self.fingerprint) != origin.fingerprint:
            got = f"a lens of other weights{_of(origin.model)}, {origin.fingerprint}"
            do = "accept them with other_weights (--other-weights)"
            raise UsageError(explain(file.where, got=got, expected=f"{fingerprint}, as {self.directory}", do=do))


def open_lens(
    model: str | os.PathLike[str],
    file: str | os.PathLike[str] | LensFile | None = None,
    *,
    other_weights: bool = False,
) -> Lens:
    """Return a lens of a model: its logit lens, or the lens that a file has.

    model: a directory with `config.json` and safetensors, the name of a repository in the local Hugging Face cache, or
        `demo`. A lens file in its place is opened with the model that the file names.
    file: a tuned lens or a Jacobian lens, as `capflow lens` writes them.
    other_weights: accept a lens of other weights of the same sizes, such as those before fine-tuning.

    Raises UsageError if the files are not on this machine or cannot be used, and if the lens is of another model.
    """
    name = os.fspath(model)
    if file is None and name.endswith(".safetensors") and Path(name).is_file():
        file = name
    opened = LensFile(file) if isinstance(file, str | os.PathLike) else file
    if opened is not None and name == opened.where:
        name = opened.origin.model
        if not name:
            raise UsageError(explain(f"{opened.where}: model", got="none", do="name the model: open_lens(model, file)"))
    return Lens(open_model(name), opened, other_weights=other_weights)


def _site(site: SiteLike) -> Site:
    if isinstance(site, str):
        return Site.parse(site)
    if isinstance(site, bool) or not isinstance(site, tuple | int | np.integer):
        raise UsageError(explain("lens: site", got=site, expected='a layer, (layer, hook) or "hook:layer"'))
    if isinstance(site, tuple):
        if len(site) != 2 or not isinstance(site[0], int | np.integer) or not isinstance(site[1], str):
            raise UsageError(explain("lens: site", got=site, expected="(layer, hook)"))
        return Site.parse(f"{site[1]}:{site[0]}")
    return Site(int(site), HOOK_DEFAULT)


def _after(blocks: int) -> Site:
    """Return a site whose rows have passed so many blocks."""
    return Site(blocks - 1, HOOK_DEFAULT) if blocks else Site(0, "pre_attn")


def _of(model: str) -> str:
    return f" of {model}" if model else ""


def _stacked(arrays: Sequence[Ids | None], parts: Sequence[LensPart]) -> Ids | None:
    """Return arrays of all parts as one, -1 for a part without; None if no part has one."""
    if all(array is None for array in arrays):
        return None
    filled = [
        np.full(len(part.rows), -1, np.int64) if array is None else array
        for array, part in zip(arrays, parts, strict=True)
    ]
    return np.concatenate(filled)


def _joined(readings: Sequence[LensReading]) -> LensReading:
    if len(readings) == 1:
        return readings[0]
    columns = zip(*readings, strict=True)
    joined: list[Any] = [
        list(itertools.chain.from_iterable(each)) if isinstance(each[0], list) else np.concatenate(each)
        for each in columns
    ]
    return LensReading(*joined)
