"""Reads a data set with a lens: requests one after another, checked before the first is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import capflow
from capflow.capture.positions import Positions
from capflow.capture.site import HOOK_DEFAULT, Site
from capflow.capture.spec import layers_of
from capflow.errors import CapflowError, UsageError, explain
from capflow.lenses.captured import NEXT, SiteReading, read_capture, wanted_sites
from capflow.lenses.file import LensFile
from capflow.lenses.lens import Lens, open_lens


class LensedRequest(NamedTuple):
    """A captured request and what the lens reads from it, by positions and then by sites."""

    capture: Any
    readings: Iterator[SiteReading]


class DatasetLens:
    """A lens on the requests of a data set.

    model: the model; by default that of the data set, and it must be one.
    file: the lens file; None for the logit lens.
    request: the id of one request; by default all.
    layers, hook: the layers to read, as in a capture; by default all captured ones.
    token: a token whose rank and probability are wanted, or `next`.

    Raises UsageError for whatever cannot be read, before rows are.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: str | None = None,
        file: Path | None = None,
        request: str | None = None,
        layers: str | None = None,
        hook: str = HOOK_DEFAULT,
        positions: str = "all",
        token: str | None = None,
        k: int = 5,
        other_weights: bool = False,
    ) -> None:
        data = capflow.open(path)
        if damaged := data.damaged():
            raise CapflowError(damaged[0])
        self._captures = [data[request]] if request is not None else list(data)
        if not self._captures:
            raise UsageError(explain(str(path), got="no requests", expected="a captured request"))
        self._positions = Positions.parse(positions, where="--positions")
        self._k = k
        # A lens file is checked before the model's files are looked for.
        lens_file = None if file is None else LensFile(file)
        self.lens: Lens = open_lens(model or self._model(path), lens_file, other_weights=other_weights)
        self._sites = None if layers is None else self._named(layers, hook)
        self._token: str | int | None = token
        if token is not None and token != NEXT:
            self._token = self.lens.token(token)
        for capture in self._captures:
            width = capture.sidecar.hidden_size
            if width != self.lens.hidden_size:
                got, expected = f"rows of width {width}", f"{self.lens.hidden_size}, as {self.lens.directory}"
                raise UsageError(explain(f"{path}: request {capture.id}", got=got, expected=expected))
            wanted_sites(self.lens, capture, self._sites)

    def __len__(self) -> int:
        return len(self._captures)

    def requests(self) -> Iterator[LensedRequest]:
        """Yield each request. Its readings must be taken before the next request."""
        for capture in self._captures:
            yield LensedRequest(
                capture,
                read_capture(
                    self.lens,
                    capture,
                    self._k,
                    sites=self._sites,
                    positions=self._positions,
                    token=self._token,
                ),
            )

    def _model(self, path: Path) -> str:
        """Return the model of the data set."""
        names = sorted({capture.sidecar.model for capture in self._captures})
        if len(names) != 1 or not names[0]:
            got = f"requests of {' and '.join(names) or 'an unknown model'}"
            do = "choose one with --request, or name the model with --model"
            raise UsageError(explain(str(path), got=got, expected="one model", do=do))
        return str(names[0])

    def _named(self, layers: str, hook: str) -> list[Site]:
        """Return the sites that the options name."""
        return [Site(layer, hook) for layer in layers_of(layers, self.lens.num_layers, "--layers")]
