"""The origin of a lens file: the model that it is for, and how it was made."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

LensKind = Literal["tuned", "jacobian"]
"""The kinds of translators: `h + weight · h + bias`, or `weight · h`."""

LENS_KINDS: tuple[str, ...] = get_args(LensKind)


class LensOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The metadata of a lens file. Safetensors stores each field as text.

    model, revision: the model's name, and its revision in the Hugging Face cache; empty if they are not known.
    num_layers, hidden_size, vocabulary_size: the model's sizes; a vocabulary of 0 is not known.
    fingerprint: `Unembedding.fingerprint` of the model's weights; empty if it is not known.
    source: the file that the lens was imported from.
    definition: what the translators are.
    texts, tokens, positions: how many texts it was fitted on, their tokens, and the positions that count.
    texts_sha256: the SHA-256 of the file of texts.
    skipped: how many first positions of each text do not count.
    tokens_max: how many tokens of each text were used.
    dtype: the dtype that the model was computed in.
    made_by: the programs that made it, with their versions.
    format: what torch writes there; it means nothing.
    """

    kind: LensKind
    num_layers: int
    hidden_size: int
    vocabulary_size: int = 0
    model: str = ""
    revision: str = ""
    fingerprint: str = ""
    source: str = ""
    definition: str = ""
    texts: int = 0
    tokens: int = 0
    positions: int = 0
    texts_sha256: str = ""
    skipped: int = 0
    tokens_max: int = 0
    dtype: str = ""
    made_by: str = ""
    format: str = ""

    def metadata(self) -> dict[str, str]:
        """Return the fields that differ from their defaults, as text."""
        return {name: str(value) for name, value in msgspec.to_builtins(self).items()}
