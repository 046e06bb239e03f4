"""The vocabulary: the text of each token, from a model's `tokenizer.json`.

Two notations are undone: that of byte-level BPE, in which each byte is a printable character and a space is `Ġ`
(GPT-2's `bytes_to_unicode`), and that of SentencePiece, in which a space is `▁` and `<0x0A>` is a byte. Bytes that are
no whole character give U+FFFD.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow.lenses.model_files import read_json

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Tokenizer(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[_Added] = []
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


class Vocabulary:
    """The tokens of a model's directory; none if it has no `tokenizer.json`.

    Raises UsageError if the file is damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        # The tokens as the file has them, and those that were added, which are plain text.
        self._tokens: dict[int, str] = {}
        self._added: dict[int, str] = {}
        self._byte_level = False
        if not path.is_file():
            return
        try:
            tokenizer = msgspec.json.decode(read_json(path), type=_Tokenizer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise UsageError(explain(f"{path}", got=str(e), expected="a tokenizer of the library tokenizers")) from e
        vocab = tokenizer.model.vocab
        if isinstance(vocab, dict):
            self._tokens = {number: token for token, number in vocab.items()}
        else:
            self._tokens = {number: token for number, (token, _) in enumerate(vocab)}
        self._added = {added.id: added.content for added in tokenizer.added_tokens}
        self._byte_level = _has_byte_level(tokenizer.decoder) or _has_byte_level(tokenizer.pre_tokenizer)

    def text(self, token_id: int) -> str | None:
        """Return the text of a token; None if the token is unknown."""
        text = self._added.get(token_id)
        if text is None:
            token = self._tokens.get(token_id)
            if token is None:
                return None
            text = _of_bytes(token) if self._byte_level else _of_pieces(token)
        return text

    def ids(self, text: str) -> list[int]:
        """Return the ids of the tokens with a text, rising."""
        return sorted(token for token in {*self._tokens, *self._added} if self.text(token) == text)


def _has_byte_level(part: Any) -> bool:
    """Return whether a part of a tokenizer is, or has in it, the one that maps bytes to characters."""
    if isinstance(part, dict):
        return part.get("type") == "ByteLevel" or any(_has_byte_level(inner) for inner in part.values())
    return isinstance(part, list) and any(_has_byte_level(inner) for inner in part)


def _of_pieces(token: str) -> str:
    match = _BYTE.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)]).decode(errors="replace")
    return token.replace("▁", " ")


def _of_bytes(token: str) -> str:
    # A character that stands for no byte is of a token that was added in plain text.
    if not all(character in _BYTES for character in token):
        return token
    return bytes(_BYTES[character] for character in token).decode(errors="replace")


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()
