"""The distribution of a request's first token, reduced to a few numbers where it is computed.

A distribution has as many values as the vocabulary has tokens, and a sweep has thousands of them, so they never leave
the worker. A logits processor reads each one in float32, as the model computes it, before any temperature, and changes
nothing. A request asks for it in `extra_args["capflow_measured"]`: `{"request": name, "reference": name, "group": name,
"tokens": [answer, wrong answer]}`. The distribution of a request whose name is its reference is kept to compare others
with, until a request of another group comes.

Results are lines of JSON in the file that `CAPFLOW_MEASURED_OUT` names: `request`, `logits` and `logprobs` of the
tokens, `kl`, which is KL(reference || this) in nats over the whole vocabulary, `top`, the likeliest token, and `values`
of the functions that `CAPFLOW_MEASURED_FUNCTIONS` names, `module:function` separated by commas; or `error`, with the
message of a function that failed. NaN and infinities are written as Python's `json` reads them. A prompt that is
computed in chunks has a line for each; the last one counts. The processor does nothing without the variable.

Source of KL as a metric of patching: Zhang and Nanda 2024, arXiv:2309.16042.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from capflow.errors import explain
from capflow.plugins.function import function_named

MEASURED_KEY = "capflow_measured"
MEASURED_OUT = "CAPFLOW_MEASURED_OUT"
MEASURED_FUNCTIONS = "CAPFLOW_MEASURED_FUNCTIONS"

_ELEMENTS_MAX = 1 << 24


class _Asked(NamedTuple):
    """A running request.

    output: its tokens so far, which vLLM appends to.
    """

    request: str
    reference: str
    tokens: Sequence[int]
    output: list[int]


class MeasuredLogits(LogitsProcessor):  # type: ignore[misc]
    """Measures the first token of the requests that ask for it."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:  # noqa: ARG002 - vLLM's signature
        self._asked: dict[int, _Asked] = {}
        self._out = Path(os.environ[MEASURED_OUT]) if os.environ.get(MEASURED_OUT) else None
        names = os.environ.get(MEASURED_FUNCTIONS, "") if self._out else ""
        self._functions = {name: function_named(name, "--metrics") for name in names.split(",") if name}
        # Log probabilities `[vocabulary]` of references, by name, those of `_group` only.
        self._references: dict[str, torch.Tensor] = {}
        self._group = ""

    def is_argmax_invariant(self) -> bool:
        """Return False: vLLM calls a processor that may change the likeliest token for every request."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests of the batch."""
        process_dict_updates(self._asked, batch_update, self._new)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Measure the rows of the requests that ask for it."""
        rows = [(index, asked) for index, asked in self._asked.items() if not asked.output]
        if rows and self._out is not None and get_tensor_model_parallel_rank() == 0:
            size = max(1, _ELEMENTS_MAX // logits.shape[-1])
            # References come first: a request of the same step may be compared with them.
            rows.sort(key=lambda row: row[1].request != row[1].reference)
            lines = [
                json.dumps(line)
                for start in range(0, len(rows), size)
                for line in self._measured(logits, rows[start : start + size])
            ]
            with self._out.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        return logits

    def _new(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Asked | None:  # noqa: ARG002
        asked = (params.extra_args or {}).get(MEASURED_KEY)
        if asked is None:
            return None
        if asked["group"] != self._group:
            self._references.clear()
            self._group = asked["group"]
        return _Asked(asked["request"], asked["reference"], asked["tokens"], output)

    def _measured(self, logits: torch.Tensor, rows: Sequence[tuple[int, _Asked]]) -> Iterator[dict[str, Any]]:
        device = logits.device
        values = logits[torch.tensor([index for index, _ in rows], device=device)].float()
        logprobs = values.log_softmax(-1)
        for row, (_, asked) in zip(logprobs, rows, strict=True):
            if asked.request == asked.reference:
                self._references[asked.request] = row.clone()
        tokens = torch.tensor([list(asked.tokens) for _, asked in rows], device=device)
        kl = torch.empty(len(rows), device=device)
        for name in dict.fromkeys(asked.reference for _, asked in rows):
            mine = torch.tensor([n for n, (_, asked) in enumerate(rows) if asked.reference == name], device=device)
            kl[mine] = divergences(self._references[name], logprobs[mine])
        lists = [each.tolist() for each in (values.gather(1, tokens), logprobs.gather(1, tokens), kl, values.argmax(1))]
        for number, (of_tokens, of_logprobs, divergence, top) in enumerate(zip(*lists, strict=True)):
            asked = rows[number][1]
            line = {
                "request": asked.request,
                "logits": of_tokens,
                "logprobs": of_logprobs,
                "kl": divergence,
                "top": top,
            }
            yield line | self._values(values[number], asked)

    def _values(self, row: torch.Tensor, asked: _Asked) -> dict[str, Any]:
        if not self._functions:
            return {}
        given, values = row.cpu().numpy(), {}
        for name, function in self._functions.items():
            try:
                values[name] = float(function(given, *asked.tokens))
            except Exception as e:  # noqa: BLE001 - a user's function; its message reaches the user
                expected = "a number for the logits [vocabulary] float32, the answer and the wrong answer"
                return {"error": explain(f"the metric {name}", got=f"{type(e).__name__}: {e}", expected=expected)}
        return {"values": values}


def divergences(reference: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(reference || each) `[n]` of log probabilities `[vocabulary]` and `[n, vocabulary]`.

    A token that the reference excludes (-inf) adds nothing. NaN in either row gives NaN.
    """
    terms = (reference - logprobs).mul_(reference.exp())
    excluded = reference == -torch.inf
    return (terms.masked_fill_(excluded, 0.0) if excluded.any() else terms).sum(-1)
