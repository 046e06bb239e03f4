"""What steering costs for each of 256 requests, by processor time and part; no engine starts.

    PYTHONPATH=.:engine_ext python benchmarks/steering_requests.py

Every request has a vector of 640 numbers for each of 18 layers. With one configuration all share their parameters, with
256 each has its own. The parts are those that a request passes from `capflow.LLM` to a worker's bank, without vLLM's
own copies. All of it is once a request, beside the steps.

Predicted: 0.1 ms for each request of one configuration, for its own copies; 0.6 ms for each of 256, by half for rows
that are hashed and copied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow_engine.request.options import RequestOptions
from capflow_engine.request.params import Prepared, sampling_params
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore
from capflow_engine.taps.bank import Bank

LAYERS, WIDTH, REQUESTS, PROMPT, TURNS = 18, 640, 256, 4, 7
INFO = ModelInfo("demo", LAYERS, WIDTH, "float32", tuple(Site(layer, "post_block") for layer in range(LAYERS)))
FIT = Fit(INFO, Size.of(256 << 20, WIDTH, REQUESTS))


def parameters(configurations: int, rng: np.random.Generator) -> list[Any]:
    """Return the parameters of each request; request n has configuration n % configurations."""
    many = []
    for _ in range(configurations):
        rows = 0.01 * rng.standard_normal((LAYERS, WIDTH)).astype(np.float32)
        packed = {"dtype": "float32", "shape": [LAYERS, WIDTH], "layer_indices": list(range(LAYERS))}
        vectors = {"post_block": packed | {"data": rows.tobytes()}}
        many.append(sampling_params(steering_vectors=vectors, max_tokens=4))
    return [many[n % configurations] for n in range(REQUESTS)]


def admitted(wire: dict[str, Any]) -> RequestOptions:
    """Read a request's options as the scheduler does."""
    options = RequestOptions.unpack(wire)
    options.check(INFO)
    FIT.size.check(options.program, PROMPT)
    assert options.program is not None
    assert any(options.program.phase_effects)
    options.program.patched_effects(PROMPT)
    return options


def turn(params: list[Any]) -> dict[str, float]:
    """Take the requests from their parameters to a bank; return the milliseconds of each part."""
    parts: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.thread_time_ns()
        result = call()
        parts[name] = (time.thread_time_ns() - begin) / 1e6
        return result

    names = [f"r{n}" for n in range(REQUESTS)]
    bank = Bank(FIT.size.plus(FIT.size.reserve), {s: n for n, s in enumerate(INFO.sites)}, WIDTH, torch.device("cpu"))
    bank.rows.zero_()
    prepared = timed("checked and compiled", lambda: Prepared.each(params, FIT, SteeringStore(), names))
    sent = timed("encoded", lambda: [msgspec.msgpack.encode(dict(each.params.extra_args)) for each in prepared])
    came = timed("decoded", lambda: [msgspec.msgpack.decode(each) for each in sent])
    options = timed("options, needs, keys", lambda: [admitted(each) for each in came])
    timed("into the bank", lambda: [bank.acquire(each.program, PROMPT) for each in options])
    timed("for checksums and events", lambda: [(one.program.content_key, sorted(one.program.sites)) for one in options])
    parts["all"] = sum(parts.values())
    return parts


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    turns = {count: [turn(parameters(count, rng)) for _ in range(TURNS)] for count in (1, REQUESTS)}
    print(f"| ms for {REQUESTS} requests | 1 configuration | {REQUESTS} |")
    print("|---|---|---|")
    for part in turns[1][0]:
        medians = [statistics.median(each[part] for each in turns[count]) for count in turns]
        print(f"| {part} | {medians[0]:.1f} | {medians[1]:.1f} |")


if __name__ == "__main__":
    main()
