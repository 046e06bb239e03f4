"""The tap's share of a model's step on a GPU. Prints a Markdown table.

A stack in the shape of an 8B Llama 3, with random weights, is compiled layer by layer and captured in a CUDA graph, as
vLLM does it; the tap is a custom op in each layer. Attention is left out, so a tap's share is an upper bound.

    PYTHONPATH=.:engine_ext:tests python3 benchmarks/gpu_decode.py [--out FILE]

It needs the packages of `gpu_kernels.py` and 20 GiB on the GPU, and takes under two minutes. Without a GPU, `--smoke`
runs the same code in Triton's interpreter on small shapes; the times then mean nothing.

Predicted: idle taps cost below 1 % of a step, the capture of all layers at most 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_kernels as kernels  # sets TRITON_INTERPRET for --smoke, before kernels are defined
import torch
from gpu_kernels import DEVICE, HOOK, SMOKE

from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.steering.program import ADD, Op, SiteOps, SteeringProgram, digest
from capflow_engine.steering.budget import Size
from capflow_engine.taps.acting import SlotRange
from capflow_engine.taps.bank import Bank, Steered
from capflow_engine.taps.gpu.kernel import launch
from capflow_engine.taps.plan import Plan, Planner, Scheduled
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.tables import Tables

LAYERS, WIDTH, QKV, MLP = (3, 64, 96, 128) if SMOKE else (32, 4096, 6144, 14336)
TOKENS = (4,) if SMOKE else (1, 32, 256)
ROUNDS = 1 if SMOKE else 9
ROUND_US = 50_000
DTYPE = torch.bfloat16
APART = 0.02  # of a stream's norm; a value of bfloat16 is rounded by up to 0.004 of it

_library = torch.library.Library("capflow_benchmark", "FRAGMENT")
_library.define("tap" + torch.library.infer_schema(launch, mutates_args=["hidden"]))
_library.impl("tap", launch, "CPU" if SMOKE else "CUDA")
torch.library.register_fake("capflow_benchmark::tap", lambda *_: None, lib=_library)


def layer(
    hidden: torch.Tensor, residual: torch.Tensor, weights: dict[str, torch.Tensor], tap: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer; the queries stand for what attention returns.

    tap: the tensors of the layer's tap; empty: it has none.
    """
    x, residual = _add_norm(hidden, residual, weights["norm"])
    queries = torch.nn.functional.linear(x, weights["qkv"])[:, :WIDTH]
    x, residual = _add_norm(torch.nn.functional.linear(queries, weights["out"]), residual, weights["mlp_norm"])
    gate, up = torch.nn.functional.linear(x, weights["gate_up"]).chunk(2, -1)
    hidden = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weights["down"])
    if tap:
        torch.ops.capflow_benchmark.tap(hidden, residual, *tap, 1.0)
    return hidden, residual


def _add_norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stream = hidden.float() + residual.float()
    normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5)
    return normed.to(DTYPE) * weight, stream.to(DTYPE)


class Model:
    """The weights, and the tables and the bank of the taps."""

    def __init__(self) -> None:
        shapes = {
            "norm": (WIDTH,),
            "qkv": (QKV, WIDTH),
            "out": (WIDTH, WIDTH),
            "mlp_norm": (WIDTH,),
            "gate_up": (2 * MLP, WIDTH),
            "down": (WIDTH, MLP),
        }
        self.weights = [
            {name: torch.randn(shape, dtype=DTYPE, device=DEVICE) / shape[-1] ** 0.5 for name, shape in shapes.items()}
            for _ in range(LAYERS)
        ]
        self.tables = Tables(
            sites=LAYERS,
            tokens=TOKENS[-1],
            rows=LAYERS * TOKENS[-1],
            hidden=WIDTH,
            dtype=DTYPE,
            device=DEVICE,
            resident=True,
        )
        self.bank = Bank(Size(2, 2 * LAYERS, 2), {Site(n, HOOK): n for n in range(LAYERS)}, WIDTH, DEVICE)
        self.vector = torch.randn(WIDTH)
        content = self.vector.numpy().tobytes()
        self.everywhere, self.first = (
            self.bank.acquire(SteeringProgram(WIDTH, content, (digest(content),), ops, ops), 1)
            for ops in (tuple(SiteOps(n, HOOK, (Op(ADD, 0),)) for n in range(count)) for count in (LAYERS, 1))
        )
        self.taps = [
            [
                torch.tensor([n], dtype=torch.int32, device=DEVICE),
                *self.tables.device_tensors().values(),
                *self.bank.device_tensors().values(),
            ]
            for n in range(LAYERS)
        ]

    def plan(self, tokens: int, *, captured: bool, steered: Steered | None = None) -> Plan:
        """Return the plan of a decode step of `tokens` requests that all ask for the same."""
        planner = Planner(LAYERS)
        program = planner.program(dict.fromkeys(range(LAYERS), Positions.ALL) if captured else {})
        batch = []
        for n in range(tokens):
            request = Tracked(str(n), str(n), 1, program, planner.nothing)
            request.steered = [SlotRange(0, 1, steered)] if steered else None
            batch.append(Scheduled(request, n, 5, 1))
        return planner.plan(batch)


class Step:
    """A step of the model as a CUDA graph. After `replay`, `streams` holds the two halves after each layer."""

    def __init__(self, model: Model, tokens: int, *, taps: bool) -> None:
        self._model, self._taps = model, taps
        generator = torch.Generator().manual_seed(tokens)
        self._entry = torch.randn(2, tokens, WIDTH, generator=generator).to(DTYPE).to(DEVICE)
        self._layer = torch.compile(layer, fullgraph=True, backend="aot_eager" if SMOKE else "inductor")
        self.streams: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(2):  # compiles
            self._forward()
        self.replay = kernels.graph_of(self._forward)

    def _forward(self) -> None:
        hidden, residual = self._entry
        self.streams = []
        for n in range(LAYERS):
            hidden, residual = self._layer(
                hidden, residual, self._model.weights[n], self._model.taps[n] if self._taps else []
            )
            self.streams.append((hidden, residual))


def check(model: Model, plain: Step, tapped: Step, tokens: int) -> None:
    """Compare the stream of idle taps with that of none, then all rows with a stream that is steered at one layer.

    The first is not equal to the bit: the compiler picks the order of a sum anew for each graph.
    """
    model.tables.load(model.plan(tokens, captured=False), tokens)
    plain.replay()
    tapped.replay()
    for number, (halves, others) in enumerate(zip(plain.streams, tapped.streams, strict=True)):
        some, other = (half.double() + rest.double() for half, rest in (halves, others))
        assert (some - other).norm() <= APART * some.norm(), f"layer {number}: idle"
    hidden, residual = (half.clone() for half in tapped.streams[0])
    model.tables.staging.fill_(-1.0)
    model.tables.load(model.plan(tokens, captured=True, steered=model.first), tokens)
    tapped.replay()
    rows = model.tables.staging[: LAYERS * tokens].view(LAYERS, tokens, WIDTH)
    assert torch.equal(rows[0], kernels.rounded(hidden.float() + residual.float(), DTYPE)), "layer 0: rows"
    steered = kernels.rounded(hidden.float() + model.vector.to(DEVICE), DTYPE)
    assert torch.equal(tapped.streams[0][0], steered), "layer 0: steered"
    for number, (first, second) in list(enumerate(tapped.streams))[1:]:
        expected = kernels.rounded(first.float() + second.float(), DTYPE)
        assert torch.equal(rows[number], expected), f"layer {number}: rows"
    assert not torch.equal(tapped.streams[-1][0], plain.streams[-1][0]), "steering at layer 0 changes the last one"


def measure(model: Model, tokens: int) -> dict[str, float]:
    """Check the step, then return its microseconds by kind.

    Each time is compared with one without taps just before it, since the clocks of a GPU under load change.
    """
    plain, tapped = (Step(model, tokens, taps=taps) for taps in (False, True))
    check(model, plain, tapped, tokens)
    plans = {
        "idle": model.plan(tokens, captured=False),
        "capture": model.plan(tokens, captured=True),
        "add": model.plan(tokens, captured=False, steered=model.everywhere),
    }
    replays = max(1, round(ROUND_US / kernels.time_of(plain.replay, 1)))
    base: list[float] = []
    ratios: dict[str, list[float]] = {kind: [] for kind in plans}
    for _ in range(ROUNDS):
        for kind, plan in plans.items():
            model.tables.load(plan, tokens)
            base.append(kernels.time_of(plain.replay, replays))
            ratios[kind].append(kernels.time_of(tapped.replay, replays) / base[-1])
    plain_us = statistics.median(base)
    return {"no taps": plain_us, **{kind: plain_us * statistics.median(values) for kind, values in ratios.items()}}


def tables() -> Iterator[str]:
    """Check and measure; yield the lines of the table."""
    yield f"{kernels.device_name()}: {LAYERS} layers, width {WIDTH}, bfloat16; milliseconds a step:"
    yield from ("", "| tokens | no taps | idle | capture | add | idle, % | capture, % | add, % |")
    yield "|---|---|---|---|---|---|---|---|"
    model = Model()
    for tokens in TOKENS:
        step = measure(model, tokens)
        plain = step["no taps"]
        shown = [f"{value / 1000:.3f}" for value in step.values()]
        shown += [f"{100 * (value / plain - 1):.2f}" for value in list(step.values())[1:]]
        yield f"| {tokens} | {' | '.join(shown)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small shapes, in Triton's interpreter, without a GPU")
    out = parser.parse_args().out
    if not SMOKE and not torch.cuda.is_available():
        sys.exit("gpu_decode: no GPU here; --smoke runs in Triton's interpreter")
    kernels.show(tables(), out)
