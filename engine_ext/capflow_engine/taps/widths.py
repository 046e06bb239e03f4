"""Width classes: the tapped sites of one worker whose rows have one shape.

Class 0 is that of the residual stream. The sites of a class share a staging buffer, and a block of a plan has sites of
one class. Under tensor parallelism, heads and neurons are divided among the ranks: a rank has `part` numbers of each
row. All ranks then plan the rows of these classes alike, and the first rank gathers the parts after the forward pass.
The vectors that steer such a row are whole in the bank of each rank; its tap reads the numbers of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from capflow.capture.model import ModelInfo, width_of
from capflow.capture.site import DIVIDED_HOOKS, Site
from capflow.errors import CapflowError, explain


class Width(NamedTuple):
    """A width class.

    shape: the shape of a row; empty for that of the residual stream.
    width: how many numbers a row has.
    part: how many of them this rank has.
    copies: how many ranks have the same part, one after another.
    """

    shape: tuple[int, ...]
    width: int
    part: int
    copies: int = 1

    @property
    def divided(self) -> bool:
        """Whether the rows are divided among the tensor-parallel ranks."""
        return self.part != self.width or self.copies > 1

    def begin(self, rank: int) -> int:
        """Return which number of a row is the first of a tensor-parallel rank's part."""
        return rank // self.copies * self.part % self.width

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """Return whole rows `[rows, width]`, given those of every rank, `[ranks, rows, part]`."""
        return parts[:: self.copies].movedim(0, 1).reshape(parts.shape[1], self.width)


class Widths(NamedTuple):
    """The width classes of one worker, and the class of each tapped site, by the site's index."""

    classes: tuple[Width, ...]
    of_site: tuple[int, ...]

    @classmethod
    def of(cls, info: ModelInfo, sites: Sequence[Site]) -> Widths:
        """Return those of a worker.

        sites: the sites that it taps, in the order of their indices.
        """
        classes = [Width((), info.hidden_size, info.hidden_size)]
        of_site = []
        for site in sites:
            shape = info.own_shape(site)
            each = classes[0] if not shape else _divided(site, shape, info)
            if each not in classes:
                classes.append(each)
            of_site.append(classes.index(each))
        return cls(tuple(classes), tuple(of_site))

    @classmethod
    def uniform(cls, hidden: int, sites: int) -> Widths:
        """Return those of a worker whose sites all have rows of the stream's width."""
        return cls((Width((), hidden, hidden),), (0,) * sites)


def _divided(site: Site, shape: tuple[int, ...], info: ModelInfo) -> Width:
    width, ranks, parts = width_of(shape, info.hidden_size), info.ranks or 1, info.parts_of(site)
    if site.hook not in DIVIDED_HOOKS:
        return Width(shape, width, width)
    if shape[0] % parts == 0 and ranks % parts == 0:
        return Width(shape, width, width // parts, ranks // parts)
    got, expected = f"{shape[0]} over {ranks} tensor-parallel ranks", "as many on each rank"
    raise CapflowError(explain(f"site {site}", got=got, expected=expected, do="leave it out of --sites"))
