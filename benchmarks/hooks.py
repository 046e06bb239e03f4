"""The cost of hooks: plain vLLM against capflow with the sites of the stream, and with every site that the model has.

    python benchmarks/hooks.py [--rounds N] [--model demo] [--hook HOOK …] [--json FILE]

Three engines live in processes of their own for the whole run: plain, `stream` with the sites of `capflow.LLM`, and
`every` with taps at `*:*`. Turns interleave as in `overhead.py`, whose prompts these are, and a ratio is the median of
the ratios to the plain turn of the same half round. Times are CPU times of the engine's process and its hub's, with
arithmetic on one thread: on a shared machine they hold to a per cent where the clock does not hold to ten. A capturing
turn captures one hook at every layer and position. Then every row is read back, counted and verified.

Predicted: an idle tap is one call of an op that finds nothing to do, whatever its hook. Gemma-3-270m has 18 of them
with `stream` and about 230 with `every`. At 10 to 15 µs a call on a CPU that is 3 ms more in a step of 60 to 100 ms:
0.96 to 0.97, less than the goal. A hook's capture costs by its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from overhead import PROMPT_TOKENS, PROMPTS, TOKENS, Engine, ratio_of, verify

IDLE_MIN = {"stream": 0.99, "every": 0.98}


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtype", default="auto", help="float32 is faster on a CPU without AVX-512")
    parser.add_argument("--hook", action="append", help="capture this hook in turns of its own; may be repeated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    model = args.model
    if model == "demo":
        from capflow_engine.jobs.demo import prepare

        model = str(prepare())
    work = Path(tempfile.mkdtemp(prefix="capflow-bench-"))
    roots = {name: work / name for name in ("plain", "stream", "every")}
    engines = {}
    for name, root in roots.items():
        root.mkdir()
        sites = ("*:*",) if name == "every" else ()
        kind = "plain" if name == "plain" else "capflow"
        engines[name] = Engine(kind, model, root, sites, eager=args.eager, dtype=args.dtype)
    hooks = args.hook or ["post_block", "heads", "k", "neurons"]
    modes = {name: (name, "idle") for name in engines} | {hook: ("every", f"capture {hook}") for hook in hooks}
    for engine, line in modes.values():  # warm up
        engines[engine].turn(line)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    tokens: dict[str, list[list[int]]] = {}
    captured = {}
    for _ in range(args.rounds):
        for mode in [*modes, *reversed(modes)]:
            engine, line = modes[mode]
            answer = engines[engine].turn(line)
            print(f"{mode}: {answer['cpu_seconds']:.2f} CPU s", file=sys.stderr, flush=True)
            seconds[mode].append(answer["cpu_seconds"])
            tokens[mode] = answer["tokens"]
            if mode in hooks:
                assert answer["statuses"] == ["ok"] * PROMPTS, answer["statuses"]
                captured[mode] = verify(roots[engine], answer["turn"])
            engines[engine].forget()
    for process in engines.values():
        process.close()
    print(
        f"{PROMPTS} prompts x {PROMPT_TOKENS} tokens + {TOKENS} generated, {model.rsplit('/', 1)[-1]}, "
        f"{'eager' if args.eager else 'torch.compile on'}, {2 * args.rounds} turns each, interleaved"
    )
    print("| turn | of plain | quartiles | goal | rows | MB | CPU ms more than idle, for each MB | answers as plain |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in modes:
        ratio, quartiles = ratio_of(seconds["plain"], seconds[mode])
        goal = f"{IDLE_MIN[mode]:.2f}" if mode in IDLE_MIN else ""
        rows, size = captured.get(mode, (0, 0))
        more = [capture - idle for capture, idle in zip(seconds[mode], seconds["every"], strict=True)]
        costs = f"{rows} | {size / 1e6:.0f} | {statistics.median(more) * 1e9 / size:.1f}" if size else "| | "
        same = sum(a == b for a, b in zip(tokens[mode], tokens["plain"], strict=True))
        print(f"| {mode} | {ratio:.3f} | {quartiles} | {goal} | {costs} | {same}/{PROMPTS} |")
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": seconds, "captured": captured}))
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
