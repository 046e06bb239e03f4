"""Pairs of prompts for patching: a clean and a corrupted one of equal length, a right and a wrong answer of a token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from capflow.errors import UsageError, explain
from capflow_models.runs.lines import numbered_lines, read_content

Prompt = str | list[int]
"""A text, or token ids."""


class PromptPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pair as a user writes it.

    clean, corrupted: prompts with equally many tokens.
    answer: what follows the clean prompt: a text, such as " Paris", or a token id.
    wrong_answer: what follows the corrupted prompt.
    id: by default the number of the pair, from 1.
    """

    clean: Prompt
    corrupted: Prompt
    answer: str | int
    wrong_answer: str | int
    id: str | None = None


@dataclass(frozen=True)
class PairFile:
    """A file of pairs, read once: it may be a pipe."""

    path: Path
    content: bytes

    @classmethod
    def read(cls, path: Path) -> PairFile:
        """Return a file. Raises UsageError if it cannot be read."""
        return cls(path, read_content(path, "--pairs"))

    @property
    def sha256(self) -> str:
        """The SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()


PairSource = Path | PairFile | Iterable[PromptPair | Mapping[str, Any]]
"""A file of JSON Lines, or the pairs."""


class TokenPair(NamedTuple):
    """A pair in tokens.

    clean, corrupted: prompts of equal length, which differ.
    answer, wrong_answer: two different tokens.
    clean_text, corrupted_text: the prompts as text.
    clean_texts, corrupted_texts: the text of each token.
    answer_text, wrong_text: of the answers.
    """

    id: str
    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answer: int
    wrong_answer: int
    clean_text: str
    corrupted_text: str
    clean_texts: tuple[str, ...]
    corrupted_texts: tuple[str, ...]
    answer_text: str
    wrong_text: str

    @property
    def changed(self) -> tuple[int, ...]:
        """The positions at which the prompts differ, ascending."""
        return tuple(n for n, (a, b) in enumerate(zip(self.clean, self.corrupted, strict=True)) if a != b)

    def roles(self) -> tuple[str, ...]:
        """Return the role of each position, one of `ROLES`.

        The roles are those of Meng et al. 2022 (arXiv:2202.05262, figure 2), with the span of positions at which the
        prompts differ in the place of the subject.
        """
        first, stop = self.changed[0], self.changed[-1]
        last = len(self.clean) - 1
        roles = []
        for position in range(last + 1):
            if position == last:
                role = "last"
            elif position < first:
                role = "before"
            elif position == stop:
                role = "changed_last"
            elif position == first:
                role = "changed_first"
            elif position < stop:
                role = "changed_middle"
            else:
                role = "after_first" if position == stop + 1 else "after"
            roles.append(role)
        return tuple(roles)


ROLES = ("before", "changed_first", "changed_middle", "changed_last", "after_first", "after", "last", "together")
"""What a position is to its pair. The prompt's last token is `last`, whatever else it is; `together` is no position."""


def read_pairs(source: PairSource) -> tuple[list[PromptPair], list[str]]:
    """Return pairs and the place of each, for errors. Raises UsageError for an object that is no pair."""
    if isinstance(source, Path):
        source = PairFile.read(source)
    if isinstance(source, PairFile):
        numbered = numbered_lines(source.content, source.path, "--pairs", PromptPair)
        pairs, places = [pair for _, pair in numbered], [f"{source.path}, line {number}" for number, _ in numbered]
    else:
        pairs, places = [], []
        for number, given in enumerate(source, 1):
            places.append(f"pairs, pair {number}")
            pairs.append(given if isinstance(given, PromptPair) else _converted(given, places[-1]))
        if not pairs:
            raise UsageError(explain("pairs", got="none", expected="one or more"))
    names: set[str] = set()
    for number, (pair, place) in enumerate(zip(pairs, places, strict=True), 1):
        if (name := pair.id or str(number)) in names:
            raise UsageError(explain(f"{place}: id", got=f"{name} twice", expected="each id once"))
        names.add(name)
    return pairs, places


def _converted(given: Any, place: str) -> PromptPair:
    try:
        return msgspec.convert(given, PromptPair)
    except msgspec.ValidationError as e:
        fields = ", ".join(PromptPair.__struct_fields__)
        raise UsageError(explain(place, got=str(e), expected=f"an object of {fields}")) from e


class PairReader:
    """Turns pairs into tokens.

    tokenizer: of the model, by Transformers; None if it has none. Prompts and answers are token ids then.
    vocabulary: the number of tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def tokens(self, pairs: Sequence[PromptPair], places: Sequence[str]) -> list[TokenPair]:
        """Return pairs in tokens. Raises UsageError, which begins with the place, for a pair that cannot be patched."""
        numbered = enumerate(zip(pairs, places, strict=True), 1)
        return [self._pair(pair, place, number) for number, (pair, place) in numbered]

    def _pair(self, pair: PromptPair, place: str, number: int) -> TokenPair:
        clean = self._prompt(pair.clean, f"{place}: clean")
        corrupted = self._prompt(pair.corrupted, f"{place}: corrupted")
        if len(clean) != len(corrupted):
            got = f"{len(clean)} and {len(corrupted)} tokens ({self._shown(clean)}; {self._shown(corrupted)})"
            expected = "equally many"
            raise UsageError(f"{place}: clean and corrupted have {got}, expected {expected}")
        if clean == corrupted:
            raise UsageError(explain(f"{place}: clean and corrupted", got="the same prompt", expected="two prompts"))
        prompts = ((pair.clean, clean), (pair.corrupted, corrupted))
        answer = self._answer(pair.answer, prompts, f"{place}: answer")
        wrong = self._answer(pair.wrong_answer, prompts, f"{place}: wrong_answer")
        if answer == wrong:
            got = f"the token {self._text(answer)!r} for both"
            raise UsageError(explain(f"{place}: answer and wrong_answer", got=got, expected="two tokens"))
        texts = (
            self._whole(pair.clean, clean), self._whole(pair.corrupted, corrupted),
            tuple(map(self._text, clean)), tuple(map(self._text, corrupted)),
        )  # fmt: skip
        name = pair.id or str(number)
        return TokenPair(name, clean, corrupted, answer, wrong, *texts, self._text(answer), self._text(wrong))

    def _prompt(self, prompt: Prompt, field: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                do = "write token ids"
                raise UsageError(explain(field, got="a text for a model without a tokenizer", do=do))
            prompt = [int(token) for token in self._tokenizer(prompt).input_ids]
        if not prompt:
            raise UsageError(explain(field, got="no tokens", expected="one or more"))
        for token in prompt:
            self._check(token, field)
        return tuple(prompt)

    def _answer(self, answer: str | int, prompts: Sequence[tuple[Prompt, tuple[int, ...]]], field: str) -> int:
        """Return the one token that an answer adds to each of the prompts."""
        if isinstance(answer, int):
            self._check(answer, field)
            return answer
        if self._tokenizer is None:
            raise UsageError(explain(field, got="a text for a model without a tokenizer", do="write a token id"))
        given = None
        for prompt, tokens in prompts:
            if isinstance(prompt, str):
                whole = [int(token) for token in self._tokenizer(prompt + answer).input_ids]
                if tuple(whole[: len(tokens)]) != tokens:
                    got, do = f"{answer!r}, which joins the prompt's last word", "begin it with a space"
                    raise UsageError(explain(field, got=got, expected="one token of its own", do=do))
                added = whole[len(tokens) :]
            else:
                added = [int(token) for token in self._tokenizer(answer, add_special_tokens=False).input_ids]
            if len(added) != 1 or (given is not None and added[0] != given):
                got = f"{answer!r}, {len(added)} tokens after the prompt ({self._shown(added)})"
                do = "begin a word with a space, choose another one, or write a token id"
                raise UsageError(explain(field, got=got, expected="one token", do=do))
            given = added[0]
        assert given is not None
        return given

    def _check(self, token: int, field: str) -> None:
        if not 0 <= token < self._vocabulary:
            raise UsageError(explain(field, got=f"the token {token}", expected=f"0..{self._vocabulary - 1}"))

    def _whole(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return " ".join(map(str, tokens)) if self._tokenizer is None else str(self._tokenizer.decode(list(tokens)))

    def _text(self, token: int) -> str:
        return str(token) if self._tokenizer is None else str(self._tokenizer.decode([token]))

    def _shown(self, tokens: Sequence[int]) -> str:
        return " ".join(repr(self._text(token)) for token in tokens[:12]) + " …" * (len(tokens) > 12)
