"""The cost of each tier of gates: the same decode steps without steering, with static steering, and with gates.

    OMP_NUM_THREADS=1 PYTHONPATH=.:engine_ext:consumers python benchmarks/tiers.py [--model demo] [--batches 1,8,64,256]

One engine in this process, joined to a hub in another, runs all modes in turns. A turn starts a batch of requests and
times every step in which all of them decode, by the CPU time of the process: that is the time on an idle machine with
one thread, and other processes do not add to it. Ratios are those of `benchmarks.gates`: of `static` to `idle`, and of
the other modes to `static`, as they steer alike. All gates fire at the first token and stay open.

* `idle`: requests that nobody steers or captures.
* `static`: a vector at one layer.
* `in-graph`: the vector, gated by a probe of the layer before.
* `replicated`, `ordered`: a sync gate with the probe adds the vector.
* `async`: the gate in the hub gets the row of each token, and adds the vector.
* `again`: `static` once more, for the noise.

Predicted: 1.00 to 1.01 of static for `in-graph` and `ordered`, 1.01 for `replicated`, and 1.02 to 1.05 for `async`,
    whose rows leave the engine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
from safetensors.numpy import save_file

from benchmarks.gates import AGAIN, HOOK, measure, program, ratio, tiny

MODES = ("idle", "static", "in-graph", "replicated", "ordered", "async", AGAIN)
OPTIONS = {
    "replicated": "gate@replicated:{files},mode=replicated,positions=all_generated,requests=replicated-*",
    "ordered": "gate@ordered:{files},mode=ordered,positions=all_generated,requests=ordered-*",
    "async": "async_gate:{files},positions=all_generated,capture=requests,requests=async-*",
}


def consumers(directory: Path, layers: int, width: int) -> list[str]:
    """Write a probe and a vector; return the gates that use them."""
    from capflow.capture.site import Site
    from capflow.probes.probe import save_vector

    rng, middle = np.random.default_rng(0), layers // 2
    weight = np.asarray(rng.normal(size=width) * 0.01, np.float32)
    probe, vector = directory / "probe.safetensors", directory / "vector.safetensors"
    save_file({"weight": weight, "bias": np.full(1, 1e6, np.float32)}, probe, {"site": f"{HOOK}:{middle}"})
    save_vector(vector, Site(middle + 1, HOOK), rng.normal(size=width) * 0.01)
    files = f"probe={probe},vector={vector},threshold=0"
    return [each.format(files=files) for each in OPTIONS.values()]


def options_of(mode: str, model: Any) -> Any:
    """Return what a request of a mode asks for; None for nothing."""
    from capflow_engine.request.options import RequestOptions

    if mode in ("static", "in-graph", AGAIN):
        gate = "hard" if mode == "in-graph" else None
        return RequestOptions(program=program(model.num_layers, model.hidden_size, "one", gate))
    if mode == "async":
        site = {"hooks": {HOOK: [model.num_layers // 2]}, "positions": "all_generated"}
        return RequestOptions.make(capture={"async_gate": site})
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="demo, tiny, or a directory")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn at a batch of 8 or less")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(arguments)
    from transformers import AutoConfig

    import capflow
    from capflow.transport.client import Client
    from capflow_engine.jobs.demo import prepare

    path = {"demo": prepare, "tiny": tiny}.get(args.model, lambda: args.model)()
    batches = [int(batch) for batch in args.batches.split(",")]
    config = AutoConfig.from_pretrained(path)
    with tempfile.TemporaryDirectory(prefix="capflow-bench-") as directory:
        llm = capflow.LLM(
            str(path),
            consumers=consumers(Path(directory), config.num_hidden_layers, config.hidden_size),
            dtype=args.dtype,
            max_model_len=64,
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(1024, 4 * max(batches)),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
        print(f"| batch | idle step | static of idle | {' | '.join(f'{mode} of static' for mode in MODES[2:])} |")
        print(f"|---|---|{'---|' * len(MODES[1:])}")
        modes = {mode: options_of(mode, llm.capflow_model) for mode in MODES}
        for batch in batches:
            steps = max(4, min(args.steps, args.steps * 16 // batch))
            times = measure(llm, modes, batch, steps, args.rounds)
            ratios = [ratio(times, "static", "idle"), *(ratio(times, mode, "static", AGAIN) for mode in MODES[2:-1])]
            ratios.append(ratio(times, AGAIN, "static"))
            idle = 1e3 * statistics.median(times["idle"])
            print(f"| {batch} | {idle:.2f} ms | {' | '.join(f'{each:.3f}' for each in ratios)} |", flush=True)
        with Client(llm.capflow_settings.hubs[0].address) as hub:
            problems = hub.status()["problems"]
        llm.close()
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
