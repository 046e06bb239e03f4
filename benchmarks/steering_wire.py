"""The cost of reading a request's steering, by the form that it comes in.

    PYTHONPATH=. python3 benchmarks/steering_wire.py

Each line is 36 layers of 4096 numbers in one form. `parse` is the median time of `Steering.parse` on the decoded body.
`json` is that of decoding the body alone (`msgspec.json.decode`), where the form goes over HTTP. The two take turns.
The ratio is `parse` against `json`: below 1, reading costs less than decoding. `predicted` is an upper bound from
before the measurement.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from capflow.capture.dtypes import VECTOR_DTYPES
from capflow.steering.request import Steering

LAYERS, WIDTH = 36, 4096
SEED = 7


class Case:
    """One body.

    predicted_us: the predicted bound of the time of `parse`, microseconds.
    """

    def __init__(self, about: str, fields: dict[str, Any], predicted_us: float, *, json: bool) -> None:
        self.about, self.predicted_us = about, predicted_us
        self.body = msgspec.json.encode(fields) if json else None
        self.fields = msgspec.json.decode(self.body) if self.body is not None else fields


def packed(dtype: str, *, text: bool, **more: Any) -> dict[str, Any]:
    values = np.random.default_rng(SEED).standard_normal((LAYERS, WIDTH)).astype(VECTOR_DTYPES[dtype])
    data = values.tobytes()
    return {
        "dtype": dtype,
        "shape": [LAYERS, WIDTH],
        "layer_indices": list(range(LAYERS)),
        "data": base64.b64encode(data).decode() if text else data,
        **more,
    }


def plain() -> dict[str, Any]:
    rows = np.random.default_rng(SEED).standard_normal((LAYERS, WIDTH)).astype(np.float32)
    return {str(layer): row.tolist() for layer, row in enumerate(rows)}


def arrays() -> dict[int, Any]:
    return dict(enumerate(np.random.default_rng(SEED).standard_normal((LAYERS, WIDTH)).astype(np.float32)))


def vectors(layers: Any) -> dict[str, Any]:
    return {"steering_vectors": {"post_block": layers}}


def cases() -> list[Case]:
    clamped = packed("float16", text=True, min=-1.0, max=1.0)
    return [
        Case("packed float16, bytes", vectors(packed("float16", text=False)), 300, json=False),
        Case("packed bfloat16, bytes", vectors(packed("bfloat16", text=False)), 300, json=False),
        Case("packed float32, bytes", vectors(packed("float32", text=False)), 600, json=False),
        Case("packed float64, bytes", vectors(packed("float64", text=False)), 1000, json=False),
        Case("arrays of float32", vectors(arrays()), 1500, json=False),
        Case("packed float16, base64", vectors(packed("float16", text=True)), 1000, json=True),
        Case("packed float32, base64", vectors(packed("float32", text=True)), 2000, json=True),
        Case("clamps, packed float16, base64", {"steering_clamps": {"post_block": clamped}}, 2500, json=True),
        Case("lists of numbers", vectors(plain()), 8000, json=True),
    ]


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1000


def measure(case: Case, repeats: int) -> tuple[float, float | None]:
    """Return the medians of `parse` and of `json`, microseconds; None where the form does not go over HTTP."""
    parsed, decoded = [], []
    for _ in range(repeats):
        parsed.append(microseconds(lambda: Steering.parse(case.fields)))
        if case.body is not None:
            body = case.body
            decoded.append(microseconds(lambda body=body: msgspec.json.decode(body)))
    return statistics.median(parsed), statistics.median(decoded) if decoded else None


def main() -> None:
    parser = argparse.ArgumentParser(description="What reading a request's steering costs.")
    parser.add_argument("--repeats", type=int, default=100, help="times that each form is read (default: 100)")
    arguments = parser.parse_args()
    print("| form | body KiB | parse µs | predicted µs | json µs | ratio |")
    print("|---|---|---|---|---|---|")
    for case in cases():
        parse_us, json_us = measure(case, arguments.repeats)
        size = "" if case.body is None else f"{len(case.body) / 1024:.0f}"
        rest = "| |" if json_us is None else f"{json_us:.0f} | {parse_us / json_us:.2f} |"
        print(f"| {case.about} | {size} | {parse_us:.0f} | ≤ {case.predicted_us:.0f} | {rest}")


if __name__ == "__main__":
    main()
