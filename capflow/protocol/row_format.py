"""The row format of a model: the widths and dtype of its rows, and their sites.

A worker's Hello fixes it. The hub checks each frame against it before it takes the frame, so consumers can rely on the
model that `on_session` gave them.
"""

from __future__ import annotations

import msgspec

from capflow.capture.frame import FrameHeader
from capflow.capture.model import ModelInfo
from capflow.errors import RemoteProtocolError, explain


class RowFormat:
    """The widths, dtype and sites that the frames of a model's workers have in common."""

    __slots__ = ("_model", "_plain", "dtype", "hidden_size", "sites")

    def __init__(self, model: ModelInfo) -> None:
        self.dtype = model.dtype
        self.hidden_size = model.hidden_size
        self.sites = frozenset(model.sites)
        # The sites whose rows have the shape of the residual stream.
        self._plain = frozenset(site for site in model.sites if not model.own_shape(site))
        self._model = model

    def check(self, header: FrameHeader) -> None:
        """Raise RemoteProtocolError unless a frame's rows are of these sites and have their shape and dtype."""
        if header.blocks and (header.dtype, header.hidden_size) != (self.dtype, self.hidden_size):
            got, expected = f"{header.dtype} of {header.hidden_size}", f"{self.dtype} of {self.hidden_size}"
            raise RemoteProtocolError(explain("frame rows", got=got, expected=f"{expected}, as the Hello says"))
        if header.shapes is msgspec.UNSET and all(self._plain.issuperset(block.sites) for block in header.blocks):
            return
        for block, shape in zip(header.blocks, header.block_shapes, strict=True):
            if not self.sites.issuperset(block.sites):
                site = next(site for site in block.sites if site not in self.sites)
                raise RemoteProtocolError(explain("frame site", got=str(site), expected="a site of the Hello's model"))
            row = shape or (self.hidden_size,)
            for site in block.sites:
                if (own := self._model.shape_of(site)) != row:
                    got, expected = f"rows of {list(row)}", f"{list(own)}, as the Hello says"
                    raise RemoteProtocolError(explain(f"frame rows at {site}", got=got, expected=expected))
