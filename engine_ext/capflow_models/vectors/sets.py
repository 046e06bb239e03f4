"""Published forms of contrast sets, as pairs of prompts whose last tokens are compared.

| set | prompts of a pair | source |
|---|---|---|
| `read_pairs` | `{"positive": text, "negative": text}`, a JSON object a line | |
| `read_caa` | a question with two choices, answered as the behavior does and otherwise | Rimsky et al. 2024 |
| `read_reading` | one text in two templates | Zou et al. 2023 |

Rimsky et al. (Contrastive Activation Addition, arXiv:2312.06681) compare the stream at the letter of the answer; so the
prompt ends with it: `… (A`. Zou et al. (Representation Engineering, arXiv:2310.01405) compare a stimulus in a template
of the concept and in one of its opposite, at the last token, and take the first principal direction of the differences
(method `pca`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from capflow.errors import UsageError, explain
from capflow.text import jsontext
from capflow_models.backends import resolved_model
from capflow_models.model import Prompt
from capflow_models.runs.lines import numbered_lines, read_content, read_lines, read_texts
from capflow_models.vectors.fit import Pair

PLACE = "{text}"
"""Where a template has the text."""

_ASKS = "Answer:"
_LETTER = re.compile(r"\((\w+)\)")


class ChoiceItem(msgspec.Struct, frozen=True):
    """One question of a set of CAA; other fields are not read.

    question: it lists the choices.
    answer_matching_behavior, answer_not_matching_behavior: such as `(A)` and `(B)`, or `Yes` and `No`.
    """

    question: str
    answer_matching_behavior: str
    answer_not_matching_behavior: str


class ContrastPrompt(msgspec.Struct, frozen=True):
    """A prompt before it is tokens: a user's message, and how the answer begins."""

    message: str
    answer: str = ""


ContrastPairs = list[tuple[ContrastPrompt, ContrastPrompt]]


def read_pairs(path: Path) -> ContrastPairs:
    """Return the pairs of a file of `Pair`. Raises UsageError with the line."""
    return [
        (ContrastPrompt(pair.positive), ContrastPrompt(pair.negative)) for pair in read_lines(path, "--pairs", Pair)
    ]


def read_caa(path: Path) -> ContrastPairs:
    """Return the pairs of a set of CAA: a JSON list, or an object a line.

    Raises UsageError for a file of another form, an empty answer, and two equal ones.
    """
    content = read_content(path, "--caa")
    if content.lstrip()[:1] == b"[":
        try:
            items = list(enumerate(jsontext.decode(content, list[ChoiceItem]), 1))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            expected = f"a list of objects of {', '.join(ChoiceItem.__struct_fields__)}"
            raise UsageError(explain(f"--caa {path}", got=str(e), expected=expected)) from e
    else:
        items = numbered_lines(content, path, "--caa", ChoiceItem)
    if not items:
        raise UsageError(explain(f"--caa {path}", got="no questions", expected="one or more"))
    pairs = []
    for number, item in items:
        answers = [_cut(text) for text in (item.answer_matching_behavior, item.answer_not_matching_behavior)]
        if not all(answers) or answers[0] == answers[1] or not item.question.strip():
            got = f"{item.answer_matching_behavior!r} and {item.answer_not_matching_behavior!r}"
            expected = "a question, and two different answers such as (A) and (B)"
            raise UsageError(explain(f"--caa {path}, question {number}: answers", got=got, expected=expected))
        positive, negative = (ContrastPrompt(item.question, answer) for answer in answers)
        pairs.append((positive, negative))
    return pairs


def _cut(answer: str) -> str:
    """Return an answer up to its last letter: `(A` for ` (A)`."""
    stripped = answer.strip()
    return stripped.removesuffix(")") if _LETTER.fullmatch(stripped) else stripped


def read_reading(path: Path, positive: str, negative: str) -> ContrastPairs:
    """Return a pair of prompts for each text of a file: the text in two templates.

    positive, negative: templates with `{text}` in them.

    Raises UsageError for a template without it, and for two equal ones.
    """
    for option, template in (("--positive-template", positive), ("--negative-template", negative)):
        if PLACE not in template:
            raise UsageError(explain(option, got=template, expected=f"a text with {PLACE} in it"))
    if positive == negative:
        raise UsageError(explain("--negative-template", got="the positive one", expected="another"))
    texts = read_texts(path)[1]
    return [
        (ContrastPrompt(positive.replace(PLACE, text)), ContrastPrompt(negative.replace(PLACE, text))) for text in texts
    ]


def as_prompts(pairs: ContrastPairs, chat_model: str | None = None) -> list[tuple[Prompt, Prompt]]:
    """Return pairs as prompts: texts, or token ids in a model's chat template.

    chat_model: the model's directory or name, or `demo`; None for plain texts, in which an answer follows `Answer:`.

    Raises UsageError for a model without a tokenizer or without a chat template.
    """
    if chat_model is None:
        return [(_plain(positive), _plain(negative)) for positive, negative in pairs]
    tokenizer = chat_tokenizer(chat_model)
    return [(in_chat(tokenizer, positive), in_chat(tokenizer, negative)) for positive, negative in pairs]


def _plain(prompt: ContrastPrompt) -> str:
    if not prompt.answer:
        return prompt.message
    message = prompt.message.rstrip()
    return f"{message} {prompt.answer}" if message.endswith(_ASKS) else f"{message}\n\n{_ASKS} {prompt.answer}"


def chat_tokenizer(model: str) -> Any:
    """Return a model's tokenizer. Raises UsageError if it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolved_model(model))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UsageError(explain("--chat", got=f"{model}: {e}", expected="a model with a tokenizer")) from e
    if not tokenizer.chat_template:
        got = f"{model}, whose tokenizer has no chat template"
        raise UsageError(explain("--chat", got=got, expected="a chat model", do="leave --chat out"))
    return tokenizer


def in_chat(tokenizer: Any, prompt: ContrastPrompt) -> Sequence[int]:
    """Return the token ids of a message in the chat template, with the beginning of the answer."""
    messages = [{"role": "user", "content": prompt.message}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = list(tokenizer(text + prompt.answer, add_special_tokens=False).input_ids)
    return ids
