"""What the programs of all contenders share: they answer the driver on stdin and stdout, one line of JSON each.

The first line is the job, and its answer is `{"ready": true}` or `{"error": "Type: message"}`. Then `{"turn": number}`
is answered with the tokens of that turn, and `{"save": path}` with `{"saved": true}` once the rows of the last turn are
in that file. Whatever libraries print goes to stderr.

This file runs in the environments of all peers: it imports nothing but numpy and the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

KV_CACHE_BYTES = 512 * 1024**2
"""Enough for all prompts at once, and for the rows that `extract_hidden_states` keeps there."""
Job = dict[str, Any]
"""Its fields:

* `model`: a directory; `layers`, `width`: its size. `eager`: vLLM without `torch.compile`.
* `prompts`: lists of token ids, equally long. `tokens`: how many each generates.
* `mode`: what the program does. `layer`: the one that is steered and probed.
* `vectors`: a file `[prompts, width]`, the steering of each request. `weight`: a file `[width]`, the probe.
* `disk`, `memory`: empty directories for rows, the second on a memory file system.
"""


class Contender(Protocol):
    """A model that is loaded."""

    def turn(self, number: int) -> list[list[int]]:
        """Run every prompt once; return the generated tokens when all rows are where they should be."""

    def rows(self) -> npt.NDArray[np.float32]:
        """Return the rows of the last turn `[prompts, layers, positions, width]`, or its scores `[prompts, positions]`.

        A contender that only generates returns none: `[0]`.
        """


def serve(load: Callable[[Job], Contender]) -> None:
    """Load a contender and run its turns until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    try:
        contender = load(job)
        print(json.dumps({"ready": True}), file=out)
        for line in sys.stdin:
            asked = json.loads(line)
            if "turn" in asked:
                print(json.dumps({"tokens": contender.turn(asked["turn"])}), file=out)
            else:
                np.save(asked["save"], contender.rows())
                print(json.dumps({"saved": True}), file=out)
    except Exception as e:  # noqa: BLE001, the driver prints any error of any library
        import traceback

        traceback.print_exc()
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), file=out)
        # Engines that failed may keep threads that would keep this process.
        out.flush()
        os._exit(1)


def nothing() -> npt.NDArray[np.float32]:
    """Return the rows of a contender that captures none."""
    return np.empty(0, np.float32)


def engine_arguments(job: Job) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that all contenders with vLLM have."""
    return {
        "model": job["model"],
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": max(64, len(job["prompts"])),
        "enforce_eager": job["eager"],
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "skip_tokenizer_init": True,
    }


def sampling(job: Job) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` that all contenders with vLLM have: greedy, of a fixed length."""
    return {"max_tokens": job["tokens"], "temperature": 0.0, "ignore_eos": True, "detokenize": False}


def prompts(job: Job) -> list[dict[str, list[int]]]:
    """Return the prompts as vLLM takes them."""
    return [{"prompt_token_ids": prompt} for prompt in job["prompts"]]


def answers(outputs: Any) -> list[list[int]]:
    """Return the tokens of vLLM's outputs."""
    return [list(output.outputs[0].token_ids) for output in outputs]
