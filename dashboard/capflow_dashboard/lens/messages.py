"""The messages between the page's process and the process that computes lenses.

A message is its length (uint32, little-endian) and msgpack. Both sides are of one version of capflow.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct("<I")
"""The length of a message."""


Token = tuple[int, str | None, float]
"""A token: its id, its text, its probability. The text is None if the model's files have no tokenizer."""


class LensTask(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one model.

    model, num_layers, hidden_size: the model as its engine describes it.
    whole: whether these are all layers of the model; if not, it may have more.
    lens, other_weights: the lens file, and whether it may be of other weights; empty for the logit lens.
    layers: of each row the layer whose `post_block` it is.
    rows: float32 `[rows, hidden_size]`.
    """

    model: str
    num_layers: int
    hidden_size: int
    whole: bool
    lens: str
    other_weights: bool
    layers: tuple[int, ...]
    rows: bytes


class LensTokens(msgspec.Struct, frozen=True, array_like=True):
    """The most likely tokens of each row, and why there are none.

    rows: the tokens of each row, most likely first; no tokens for a row that holds NaN or infinity.
    error: one line; empty if there is none.
    """

    rows: list[list[Token]] = []
    error: str = ""
