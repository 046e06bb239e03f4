"""The cost of steering: plain vLLM against capflow armed but idle, and against every request steered at every layer.

    python benchmarks/steering.py [--rounds N] [--model demo] [--dtype float32]

    PYTHONPATH=.:engine_ext:tests python benchmarks/steering.py --clamps

The second command compares a tap that clamps with the arithmetic alone: for each clamp, a product with the stream and
one step along the direction. No engine starts. Predicted: some microseconds for each operation besides, so 2 to 3 times
for one token and below 2 for a prompt.

The engines are those of `overhead.py`: two processes for the whole run, turns interleaved, ratios of adjacent turns.
Request n of a turn has configuration n mod K, for K from 1 to the number of prompts. A configuration has a vector of
its own for every layer.

Predicted: idle as in `overhead.py`. Steering reads and writes the stream once more at each layer, and reads as many
    vectors, whatever K is. That is a few percent of a step of the demo model on a CPU, where each site costs some tens
    of microseconds besides; less on a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from overhead import PROMPT_TOKENS, PROMPTS, TOKENS, Engine, ratio_of

IDLE_MIN, STEERED_MIN, SPREAD_MAX = 0.98, 0.95, 0.02


CHAINS = {
    "a decoding request with 64 clamps": (1, (64,)),
    "the same beside 31 with one": (1, (64, *(1,) * 31)),
    "32 decoding requests with 4": (1, (4,) * 32),
    "a prompt of 128 tokens with 64": (128, (64,)),
    "a prompt of 512 tokens with 64": (512, (64,)),
}


def clamps() -> int:
    """Print the cost of clamps at one site of width 640, and that of their arithmetic."""
    import torch

    from tests.kit.tap_cases import clamp_seconds

    torch.set_num_threads(1)
    print("| one site | tap | arithmetic | ratio |")
    print("|---|---|---|---|")
    for name, (tokens, chains) in CHAINS.items():
        tap, arithmetic = clamp_seconds(tokens, chains)
        print(f"| {name} | {1e3 * tap:.2f} ms | {1e3 * arithmetic:.2f} ms | {tap / arithmetic:.1f} |")
    return 0


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="float32 is faster on a CPU without AVX-512")
    parser.add_argument("--clamps", action="store_true", help="compare clamps with their arithmetic; no engine")
    args = parser.parse_args()
    if args.clamps:
        return clamps()
    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    work = Path(tempfile.mkdtemp(prefix="capflow-bench-"))
    root = work / "rows"
    root.mkdir()
    engines = {kind: Engine(kind, model, root, eager=False, dtype=args.dtype) for kind in ("plain", "capflow")}
    counts = sorted({1, max(1, PROMPTS // 4), PROMPTS})
    modes = ["plain", "idle", *(f"steer {count}" for count in counts)]
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    answers: dict[str, list[list[int]]] = {}
    for number in range(args.rounds + 1):  # the first warms up
        for mode in (*modes, *reversed(modes)):
            answer = engines["plain" if mode == "plain" else "capflow"].turn(mode)
            print(f"{mode}: {answer['seconds']:.1f} s", file=sys.stderr, flush=True)
            answers[mode] = answer["tokens"]
            if number:
                seconds[mode].append(answer["seconds"])
    for engine in engines.values():
        engine.close()
    shutil.rmtree(work)
    print(
        f"\n{PROMPTS} prompts x {PROMPT_TOKENS} tokens + {TOKENS} generated, {2 * args.rounds} turns each, interleaved"
    )
    print("| mode | of plain | quartiles | goal |")
    print("|---|---|---|---|")
    for mode in modes:
        goal = "" if mode == "plain" else f"{IDLE_MIN if mode == 'idle' else STEERED_MIN:.2f}"
        ratio, quartiles = ratio_of(seconds["plain"], seconds[mode])
        print(f"| {mode} | {ratio:.3f} | {quartiles} | {goal} |")
    for count in counts[1:]:
        ratio, quartiles = ratio_of(seconds[f"steer {counts[0]}"], seconds[f"steer {count}"])
        print(f"{count} configurations run at {ratio:.3f} of one ({quartiles}; goal {1 - SPREAD_MAX:.2f})")
    assert answers["idle"] == answers["plain"] or args.dtype != "float32", "armed, and answers other than plain vLLM"
    assert answers[modes[-1]] != answers["plain"], "steering changed nothing"
    return 0


if __name__ == "__main__":
    sys.exit(main())
