"""Where a model keeps that the Eiffel Tower is in Paris: a causal trace of facts (Meng et al. 2022, arXiv:2202.05262).

    python examples/factual_trace.py --out trace

A pair has two prompts about two landmarks. The rows of the first are put into the run of the second, one hook, layer
and position at a time. The script draws the pictures of docs/sweeps.md and prints the cells that restore the fact best.
"""

import argparse
from pathlib import Path

from capflow_models import sweep_patch

HERE = Path(__file__).parent


def main() -> None:
    """Run the sweep, or continue it; draw, and print the strongest cells."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", default=HERE / "city_pairs.jsonl")
    parser.add_argument("--hooks", default="post_block,attn_out,mlp_out")
    parser.add_argument("--out", default="trace")
    parser.add_argument("--images", help="a directory for the pictures; by default --out")
    args = parser.parse_args()
    result = sweep_patch(
        args.model,
        Path(args.pairs),
        hooks=args.hooks,
        direction="both",
        out=args.out,
        align="role",
        progress=lambda done, total: print(f"{done} of {total} runs", flush=True),
    )
    result.save(args.out)
    for direction in result.directions:
        path = Path(args.images or args.out) / f"factual_trace_{direction}.png"
        result.heatmap("logit_diff", direction).savefig(path, dpi=110, metadata={"Software": None})
    best: dict[tuple[str, ...], dict] = {}
    for cell in result.summary.to_pylist():
        if cell["metric"] == "logit_diff" and cell["recovery"] is not None:
            moved = cell["recovery"] if cell["direction"] == "denoise" else 1 - cell["recovery"]
            key = (cell["direction"], cell["hook"], cell["place"])
            if key not in best or moved > best[key]["moved"]:
                best[key] = cell | {"moved": moved}
    for (direction, hook, place), cell in best.items():
        low, high = cell["recovery_low"], cell["recovery_high"]
        interval = "one pair has no interval" if low is None else f"{low:.2f} to {high:.2f}"
        print(f"{direction:8} {hook:10} {place:14} layer {cell['layer']:2}  {cell['recovery']:5.2f}  ({interval})")


if __name__ == "__main__":
    main()
