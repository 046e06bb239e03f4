"""Answers with given tokens: a logits processor that makes a request generate them, and compares distributions.

A forced request runs as any other does, step by step, with all that steers it; only the choice of its tokens is made
for it. Beside that the processor compares the distribution of each of its tokens with that of a *reference* request,
which was forced onto the same tokens before: it computes KL(reference || this) over the whole vocabulary, in float32,
from logits as the model computes them, before any temperature. So both have the same tokens before each position.

A request asks for it in `extra_args["capflow_forced"]`: `{"tokens": […], "request": name, "group": name, "reference":
name}`. References of one group are kept until another group comes. Results are lines of JSON in the file that
`CAPFLOW_FORCED_OUT` names: `request`, `position` in the answer, `kl`, and `logprob` of the forced token. NaN and
infinities are written as Python's `json` reads them. A position that is computed again has another line; the last one
counts. The processor does nothing without the variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

FORCED_KEY = "capflow_forced"
FORCED_OUT = "CAPFLOW_FORCED_OUT"


class _Forced(NamedTuple):
    """A running request.

    output: its tokens so far, which vLLM appends to; some may be placeholders.
    """

    tokens: Sequence[int]
    request: str
    group: str
    reference: str
    output: list[int]


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Forces tokens of the requests that ask for it."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: ARG002 - vLLM's signature
        self._forced: dict[int, _Forced] = {}
        self._out = Path(os.environ[FORCED_OUT]) if os.environ.get(FORCED_OUT) else None
        # Log probabilities of references `[vocabulary]` by name and position, those of `_group` only.
        self._references: dict[tuple[str, int], torch.Tensor] = {}
        self._group = ""

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes which token is the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests of the batch."""
        process_dict_updates(self._forced, batch_update, self._new)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Measure the rows of forced requests, then leave one token in each."""
        lines = []
        for index, forced in self._forced.items():
            position = len(forced.output)
            if position >= len(forced.tokens):
                continue
            token = forced.tokens[position]
            if self._out is not None and forced.reference:
                lines.append(self._measured(logits[index], forced, position, token))
            logits[index] = -torch.inf
            logits[index, token] = 0.0
        if lines and self._out is not None and get_tensor_model_parallel_rank() == 0:
            with self._out.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        return logits

    def _new(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Forced | None:  # noqa: ARG002
        asked = (params.extra_args or {}).get(FORCED_KEY)
        if asked is None:
            return None
        return _Forced(asked["tokens"], asked["request"], asked["group"], asked["reference"], output)

    def _measured(self, row: torch.Tensor, forced: _Forced, position: int, token: int) -> dict[str, Any]:
        logprobs = torch.log_softmax(row.float(), dim=-1)
        if forced.group != self._group:
            self._references.clear()
            self._group = forced.group
        if forced.request == forced.reference:
            self._references[forced.reference, position] = logprobs
        kl = divergence(self._references[forced.reference, position], logprobs)
        return {"request": forced.request, "position": position, "kl": kl, "logprob": float(logprobs[token])}


def divergence(reference: torch.Tensor, logprobs: torch.Tensor) -> float:
    """Return KL(reference || other) of two rows of log probabilities `[vocabulary]`.

    A token that the reference excludes (-inf) adds nothing. NaN in either row gives NaN: a broken model is not near.
    """
    terms = reference.exp() * (reference - logprobs)
    return float(terms.masked_fill(reference == -torch.inf, 0.0).sum())
