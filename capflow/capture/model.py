"""The model that an engine runs, as a hub and its consumers know it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from capflow import limits
from capflow.capture.site import Site
from capflow.limits import Name, Text
from capflow.text.brief import brief

Sites = Annotated[tuple[Site, ...], msgspec.Meta(max_length=limits.SITES_MAX)]


class ModelInfo(msgspec.Struct, frozen=True):
    """What a hub and its consumers need to know about the model that an engine runs.

    sites: every site that carries a tap, over all pipeline stages.
    stages: how many pipeline stages there are.
    fixed: sites that can be captured and not steered, because something else is given the same tensor.
    """

    name: Text
    num_layers: int
    hidden_size: int
    dtype: Name
    sites: Sites
    stages: int = 1
    fixed: Sites = ()

    __repr__ = brief
