"""Trials: an engine's answers to requests of fixed token ids, and their time; plain vLLM runs beside, for comparison.

`python -m capflow_engine.jobs.trial` is plain vLLM, for the class `Plain`. It reads a `Setup`, then one order a line,
and answers each with a line of JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import msgspec
import numpy as np

from capflow.errors import CapflowError, explain
from capflow.steering.report import Apart
from capflow_engine.compat.child import STILL_S_MAX, wait_while_busy
from capflow_engine.jobs.child import own_output

LENGTHS = (5, 17, 33, 48, 9, 24, 40, 12)
"""The lengths of the prompts of a compared batch."""

TOKENS = 8
TIMED_PROMPTS, TIMED_LENGTH, TIMED_TOKENS = 16, 16, 16
MODEL_LENGTH = 128

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
_TOP = 20


class Setup(msgspec.Struct, frozen=True):
    """The start of an engine.

    both: another engine runs at the same time, so this one takes less than half of a GPU.
    """

    model: str
    dtype: str
    eager: bool
    both: bool

    def arguments(self) -> dict[str, Any]:
        """Return the engine's arguments, by vLLM's names."""
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_model_len": MODEL_LENGTH,
            "max_num_seqs": 2 * TIMED_PROMPTS,
            # So that each request is computed.
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        if self.both and not current_platform.is_cpu():
            arguments["gpu_memory_utilization"] = 0.42
        return arguments

    def engine_args(self) -> Any:
        """Return the arguments as vLLM's own object."""
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(**self.arguments())


class Order(msgspec.Struct, frozen=True):
    """The work of the other engine: answer the batch (0 rounds), or run the timed batch for some rounds."""

    rounds: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The answer to a request: its tokens, and for each token the logprobs of the likeliest ones in its place."""

    tokens: list[int]
    logprobs: list[dict[int, float]]


def prepare_process() -> None:
    """Have engines run in this process and log little."""
    # In one process a batch is complete before its first step, so two batches of one shape are computed alike.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TQDM_DISABLE="1")
    for name, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }.items():
        os.environ.setdefault(name, value)


def prompts(llm: Any, lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens, the same for every engine of a model.

    The special tokens at the ends of the vocabulary are not among them.
    """
    size = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(size // 8, size // 2, length).tolist()} for length in lengths]


def answers(llm: Any, given: Sequence[Any], params: Any) -> list[Answer]:
    """Run requests in one batch; return the answer to each."""
    result = []
    for output in llm.generate(list(given), params, use_tqdm=False):
        (one,) = output.outputs
        logprobs = [{token: value.logprob for token, value in step.items()} for step in one.logprobs]
        result.append(Answer(list(one.token_ids), logprobs))
    return result


def asks(max_tokens: int = TOKENS) -> dict[str, Any]:
    """Return the sampling parameters of a compared request."""
    return {"max_tokens": max_tokens, "logprobs": _TOP, **GREEDY}


def timed(llm: Any, params: Any, rounds: int) -> float:
    """Run the timed batch for some rounds; return the seconds that they took."""
    given = prompts(llm, [TIMED_LENGTH] * TIMED_PROMPTS)
    begun = time.perf_counter()
    for _ in range(rounds):
        llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - begun


def moved(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the largest difference of two distributions' logprobs. Each has only its likeliest tokens.

    A token that only one of them has is at most as likely in the other as the least likely token there.

    Raises CapflowError for logprobs that are not finite.
    """
    low, other_low = min(one.values()), min(other.values())
    both = [abs(one[token] - other[token]) for token in one.keys() & other.keys() if one[token] != other[token]]
    mine = [one[token] - other_low for token in one.keys() - other.keys()]
    theirs = [other[token] - low for token in other.keys() - one.keys()]
    differences = [0.0, *both, *mine, *theirs]
    if not np.isfinite(differences).all():
        raise CapflowError(explain("the model's logprobs", got="some that are not finite", do="try --dtype float32"))
    return max(differences)


def apart(some: Sequence[Answer], others: Sequence[Answer]) -> Apart:
    """Return the distance of two runs of the same requests, up to the first token in which they differ."""
    logprob, equal = 0.0, 0
    for one, other in zip(some, others, strict=True):
        same = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)]
        until = same.index(False) if False in same else len(same)
        equal += until
        steps = list(zip(one.logprobs, other.logprobs, strict=True))[: until + 1]
        logprob = max(logprob, *(moved(a, b) for a, b in steps))
    return Apart(logprob, equal, sum(len(one.tokens) for one in some))


class Plain:
    """vLLM without capflow, in a process of its own, from the constructor to `close`.

    log: the file for its output.
    still_s_max: at its end, the process is killed after so many seconds in which it uses no CPU.
    """

    def __init__(self, setup: Setup, log: Path, still_s_max: float = STILL_S_MAX) -> None:
        self._log = log
        self._still_s_max = still_s_max
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "capflow_engine.jobs.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )
        try:
            self._ask(setup)
        except BaseException:
            self.close()
            raise

    def answers(self) -> list[Answer]:
        """Return its answers to the batch."""
        return msgspec.json.decode(self._ask(Order()), type=list[Answer])

    def timed(self, rounds: int) -> float:
        """Run the timed batch for some rounds; return the seconds that they took."""
        return msgspec.json.decode(self._ask(Order(rounds)), type=float)

    def close(self) -> None:
        """End the process. It may take its time for as long as it uses the CPU."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not wait_while_busy(self._process, self._still_s_max):
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, order: Setup | Order) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            raise CapflowError(explain("plain vLLM ended", got=f"exit code {code}", do=f"see {self._log}"))
        if line.startswith(_FAILED):
            raise CapflowError(explain("plain vLLM failed", got=msgspec.json.decode(line)["failed"]))
        return line


_FAILED = b'{"failed":'


def main() -> int:
    """Run plain vLLM until standard input ends; return the exit code. An error is the last line of the output."""
    prepare_process()
    out = own_output()
    try:
        _answer_orders(out)
    except Exception as e:  # noqa: BLE001 - the parent reports it, and standard error has the traceback
        traceback.print_exc()
        out.write(msgspec.json.encode({"failed": f"{type(e).__name__}: {e}"}).decode() + "\n")
        return 1
    return 0


def _answer_orders(out: IO[str]) -> None:
    orders = iter(sys.stdin.buffer.readline, b"")
    setup = msgspec.json.decode(next(orders), type=Setup)
    from vllm import LLM, SamplingParams

    llm = LLM(**setup.arguments())
    out.write("null\n")
    for line in orders:
        order = msgspec.json.decode(line, type=Order)
        result: Any
        if order.rounds:
            result = timed(llm, SamplingParams(max_tokens=TIMED_TOKENS, **GREEDY), order.rounds)
        else:
            result = answers(llm, prompts(llm, LENGTHS), SamplingParams(**asks()))
        out.write(msgspec.json.encode(result).decode() + "\n")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    sys.exit(main())
