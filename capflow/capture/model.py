"""The model that an engine runs, as a hub and its consumers see it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from capflow import limits
from capflow.capture.attention import AttentionForm, AttentionForms, form_of
from capflow.capture.router import RouterForm, RouterForms
from capflow.capture.site import DIVIDED_HOOKS, Site
from capflow.limits import Name, Text
from capflow.text.brief import brief

Sites = Annotated[tuple[Site, ...], msgspec.Meta(max_length=limits.SITES_MAX)]

Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=limits.HIDDEN_SIZE_MAX)], ...], msgspec.Meta(max_length=2)]
"""The shape of a row: `[width]`, or `[heads, head_dim]`. Empty stands for the width of the stream."""


class SiteShape(NamedTuple):
    """Sites whose rows have a shape of their own."""

    shape: Shape
    sites: Sites


SiteShapes = Annotated[tuple[SiteShape, ...], msgspec.Meta(max_length=limits.SITES_MAX)]


class ModelInfo(msgspec.Struct, frozen=True, dict=True):
    """The properties of an engine's model that a hub and its consumers need.

    name: the model's name or path.
    dtype: the dtype of captured rows, by torch's name.
    sites: every site that carries a tap, over all pipeline stages.
    stages: the number of pipeline stages.
    fixed: sites that can be captured but not steered: another part of the model reads the same tensor, or the engine
        was started so.
    shapes: the sites among them whose rows are not of `hidden_size` numbers. Left out if there are none.
    attention: how attention makes its weights, of the layers with taps at `q` and `k`. Left out if there are none.
    ranks: the number of tensor-parallel ranks, which divide rows at `DIVIDED_HOOKS`. Left out if there is one.
    router: how experts are chosen, of the layers with a tap at `router`. Left out if there are none.
    """

    name: Text
    num_layers: int
    hidden_size: int
    dtype: Name
    sites: Sites
    stages: int = 1
    fixed: Sites = ()
    shapes: SiteShapes | msgspec.UnsetType = msgspec.UNSET
    attention: AttentionForms | msgspec.UnsetType = msgspec.UNSET
    ranks: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    router: RouterForms | msgspec.UnsetType = msgspec.UNSET

    __repr__ = brief

    def shape_of(self, site: Site) -> tuple[int, ...]:
        """Return the shape of a site's rows, such as `(heads, head_dim)`; `(hidden_size,)` for the residual stream."""
        return self.own_shape(site) or (self.hidden_size,)

    def own_shape(self, site: Site) -> tuple[int, ...]:
        """Return the shape of a site's rows; empty if it is that of the residual stream."""
        return self.own_shapes.get(site, ())

    def width_of(self, site: Site) -> int:
        """Return how many numbers a row of a site has."""
        return math.prod(self.shape_of(site))

    def parts_of(self, site: Site) -> int:
        """Return into how many equal parts tensor-parallel ranks divide a site's rows; 1 if each rank has whole rows.

        With fewer KV heads than ranks, neighbouring ranks have the same head.
        """
        ranks = self.ranks or 1
        if site.hook not in DIVIDED_HOOKS:
            return 1
        return min(ranks, self.shape_of(site)[0]) if site.hook in ("k", "v") else ranks

    def attention_of(self, layer: int) -> AttentionForm | None:
        """Return how a layer's attention makes its weights; None unless `q` and `k` of the layer carry taps."""
        return form_of(self.attention, layer)

    def router_of(self, layer: int) -> RouterForm | None:
        """Return how a layer's experts are chosen; None unless `router` of the layer carries a tap."""
        return form_of(self.router, layer)

    @functools.cached_property
    def steered_width(self) -> int:
        """How many numbers the widest row has at a site that can be steered; at least `hidden_size`."""
        if self.shapes is msgspec.UNSET:
            return self.hidden_size
        fixed = set(self.fixed)
        steered = (math.prod(shape) for shape, sites in self.shapes if not fixed.issuperset(sites))
        return max(self.hidden_size, *steered, 0)

    @functools.cached_property
    def own_shapes(self) -> Mapping[Site, tuple[int, ...]]:
        """The shapes of the sites whose rows are not of `hidden_size` numbers."""
        return {} if self.shapes is msgspec.UNSET else {site: shape for shape, sites in self.shapes for site in sites}


def width_of(shape: tuple[int, ...], hidden_size: int) -> int:
    """Return how many numbers a row has; an empty shape is that of the stream."""
    return math.prod(shape) if shape else hidden_size


def grouped(shapes: Mapping[Site, tuple[int, ...]]) -> tuple[SiteShape, ...] | msgspec.UnsetType:
    """Return the shapes of sites in the form of `ModelInfo.shapes`."""
    groups: dict[tuple[int, ...], list[Site]] = {}
    for site in sorted(shapes):
        groups.setdefault(shapes[site], []).append(site)
    return tuple(SiteShape(shape, tuple(sites)) for shape, sites in groups.items()) or msgspec.UNSET
