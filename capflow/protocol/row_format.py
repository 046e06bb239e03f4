"""The row format of a model: the width and dtype of its rows, and their sites.

A worker's Hello fixes it. The hub checks each frame against it before it takes the frame, so consumers can rely on the
model that `on_session` gave them.
"""

from __future__ import annotations

from capflow.capture.frame import FrameHeader
from capflow.capture.model import ModelInfo
from capflow.errors import RemoteProtocolError, explain


class RowFormat:
    """The width, dtype and sites that the frames of a model's workers have in common."""

    __slots__ = ("dtype", "hidden_size", "sites")

    def __init__(self, model: ModelInfo) -> None:
        self.dtype = model.dtype
        self.hidden_size = model.hidden_size
        self.sites = frozenset(model.sites)

    def check(self, header: FrameHeader) -> None:
        """Raise RemoteProtocolError unless a frame's rows, if any, have this width and dtype and are of these sites."""
        if header.blocks and (header.dtype, header.hidden_size) != (self.dtype, self.hidden_size):
            got, expected = f"{header.dtype} of {header.hidden_size}", f"{self.dtype} of {self.hidden_size}"
            raise RemoteProtocolError(explain("frame rows", got=got, expected=f"{expected}, as the Hello says"))
        for block in header.blocks:
            if not self.sites.issuperset(block.sites):
                site = next(site for site in block.sites if site not in self.sites)
                raise RemoteProtocolError(explain("frame site", got=str(site), expected="a site of the Hello's model"))
