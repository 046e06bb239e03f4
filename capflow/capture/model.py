"""The model that an engine runs, as a hub and its consumers see it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from capflow import limits
from capflow.capture.site import Site
from capflow.limits import Name, Text
from capflow.text.brief import brief

Sites = Annotated[tuple[Site, ...], msgspec.Meta(max_length=limits.SITES_MAX)]


class ModelInfo(msgspec.Struct, frozen=True):
    """The properties of an engine's model that a hub and its consumers need.

    name: the model's name or path.
    dtype: the dtype of captured rows, by torch's name.
    sites: every site that carries a tap, over all pipeline stages.
    stages: the number of pipeline stages.
    fixed: sites that can be captured but not steered: another part of the model reads the same tensor, or the engine
        was started so.
    """

    name: Text
    num_layers: int
    hidden_size: int
    dtype: Name
    sites: Sites
    stages: int = 1
    fixed: Sites = ()

    __repr__ = brief
