"""Which heads of a model copy from earlier in the prompt: induction heads (Olsson et al. 2022, arXiv:2209.11895).

    python examples/induction_heads.py --out induction

The prompts are random tokens, twice. Only what was there before says which token comes next in the second copy. An
induction head attends from a token to the one that followed its earlier occurrence. The script computes each head's
attention from captured queries and keys, ablates each head in a sweep, and compares the two: the heads that attend to
that token should be those without which the answer is lost, and heads of earlier layers that attend to the previous
token, which mark each token with the one before it. Path patching shows what these tell later heads. The script draws
the picture of docs/sweeps.md.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import capflow
from capflow_models import SweepResult, sweep_ablate, sweep_path

Array = npt.NDArray[Any]

LENGTH = 24
"""The tokens of a copy."""

ABLATIONS = ("zero", "mean")


def attention(queries: Array, keys: Array, window: int | None = None, scale: float | None = None) -> Array:
    """Return the attention of each head over the keys, `[heads, tokens, tokens]` float64.

    queries: `[tokens, heads, head_dim]`, as attention reads them: after norm and rotary embedding.
    keys: `[tokens, KV heads, head_dim]`; neighbouring heads share one.
    window: how many keys a query sees, its own included; None for all before it.
    scale: the factor of the products, by default `head_dim ** -0.5`.
    """
    tokens, heads, width = queries.shape
    shared = np.repeat(keys.astype(np.float64), heads // keys.shape[1], axis=1)
    scores = np.einsum("qhd,khd->hqk", queries.astype(np.float64), shared) * (scale or width**-0.5)
    back = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    scores[:, (back < 0) | (back >= (window or tokens))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def prefix_matching(weights: Array, start: int, length: int) -> Array:
    """Return what each head gives, on average, to the token behind the earlier occurrence of a query's, `[heads]`.

    weights: `[heads, tokens, tokens]`, of a prompt with two copies of `length` tokens, the first one from `start`.
    """
    queries = np.arange(start + length, weights.shape[1])
    return weights[:, queries, queries - length + 1].mean(-1)


def previous_token(weights: Array) -> Array:
    """Return what each head gives to the token before a query's, on average, `[heads]`.

    weights: `[heads, tokens, tokens]`.
    """
    queries = np.arange(1, weights.shape[1])
    return weights[:, queries, queries - 1].mean(-1)


def windows(config: Any) -> list[int | None]:
    """Return how many keys a query of each layer sees; None for all."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def scale_of(config: Any) -> float | None:
    """Return the factor of the products of queries and keys; None for the usual one."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return None if scalar is None else scalar**-0.5


def make_pairs(count: int, config: Any, begin: list[int], seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs: random tokens and the beginning of their copy; the corrupted prompt begins with other tokens.

    begin: the tokens that every prompt begins with.
    """
    rng = np.random.default_rng(seed)
    pairs = []
    for number in range(count):
        low, high = config.vocab_size // 100, config.vocab_size // 4
        first, other = rng.choice(np.arange(low, high), (2, LENGTH), replace=False).tolist()
        # The copy ends before its token `at`, which is the answer.
        at = LENGTH // 4 + number % (LENGTH // 2)
        pair = {"clean": [*begin, *first, *first[:at]], "corrupted": [*begin, *other, *first[:at]]}
        pairs.append(pair | {"answer": first[at], "wrong_answer": other[at], "id": str(number)})
    return pairs


def scores_of(model: str, prompts: list[list[int]], config: Any, begin: list[int], engine: dict[str, Any]) -> Array:
    """Return the prefix-matching and the previous-token score of each head, `[layers, heads]`, means over prompts."""
    cache, kinds = capflow.cache(model, prompts, hooks=["q", "k"], engine=engine), windows(config)
    scores = np.zeros((2, len(prompts), len(kinds), config.num_attention_heads))
    for number, (layer, window) in itertools.product(range(len(prompts)), enumerate(kinds)):
        rows = [cache[layer, hook][number] for hook in ("q", "k")]
        weights = attention(*rows, window, scale_of(config))
        scores[:, number, layer] = prefix_matching(weights, len(begin), LENGTH), previous_token(weights)
    return scores.mean(1)


def rises_of(result: SweepResult, layers: int, heads: int) -> dict[str, Array]:
    """Return how much the loss rises without each head, `[layers, heads]` by ablation, in nats: means over pairs."""
    rows = [row for row in result.patches.to_pylist() if row["metric"] == "logprob"]
    pairs = len({row["pair"] for row in rows})
    rises = {name: np.zeros((layers, heads)) for name in ABLATIONS}
    for row in rows:
        rises[row["direction"]][row["layer"], row["index"]] += (row["clean"] - row["value"]) / pairs
    return rises


def draw(scores: Array, previous: Array, rises: dict[str, Array]) -> Any:
    """Return a figure: the scores and the rises by layer and head, and each head as a point."""
    from matplotlib.figure import Figure

    figure = Figure((14, 4.8), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 2.4])
    grids = {"prefix matching": scores, "previous token": previous, "loss without it, nats": rises["mean"]}
    for axes, (title, grid) in zip(panels, grids.items(), strict=False):
        reach = np.abs(grid).max()
        signed = title.startswith("loss")
        style = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach} if signed else {"cmap": "Blues", "vmin": 0}
        image = axes.imshow(grid, origin="lower", aspect="auto", **style)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks(range(grid.shape[1]))
        axes.set_xlabel("head")
        figure.colorbar(image, ax=axes)
    panels[0].set_ylabel("layer")
    axes = panels[3]
    points = axes.scatter(scores, rises["mean"], c=previous, s=22, cmap="viridis", vmin=0, vmax=1)
    figure.colorbar(points, ax=axes, label="attention to the previous token")
    named = {*np.argsort(-scores, None)[:6].tolist(), *np.argsort(-rises["mean"], None)[:4].tolist()}
    for layer, head in zip(*np.unravel_index(sorted(named), scores.shape), strict=True):
        at = (scores[layer, head], rises["mean"][layer, head])
        axes.annotate(f"{layer}.{head}", at, fontsize=8, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("prefix matching")
    axes.set_ylabel("rise of the loss, mean ablation, nats")
    return figure


def print_paths(result: SweepResult) -> None:
    """Print the paths that lower the answer's log probability most."""
    print("sender > receiver: log probability of the answer, recovery")
    cells = [cell for cell in result.summary.to_pylist() if cell["metric"] == "logprob"]
    for cell in sorted(cells, key=lambda cell: cell["value"])[:6]:
        name = f"{cell['layer']}.{cell['index']} > {cell['receiver']}"
        print(f"{name:16} {cell['value']:6.2f}  {cell['recovery']:5.2f}")


def main() -> None:
    """Score the heads, ablate each, draw, and print the strongest."""
    from transformers import AutoConfig

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--begin", default="2", help="token ids that every prompt begins with, comma separated")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--out", default="induction")
    parser.add_argument("--images", help="a directory for the picture; by default --out")
    parser.add_argument("--senders", default="4+10", help="the layers of the senders of paths; empty for no paths")
    parser.add_argument("--receivers", default="q:5,k:5,v:5,q:11,k:11,v:11")
    args = parser.parse_args()
    path = str(capflow.demo_model()) if args.model == "demo" else args.model
    config = AutoConfig.from_pretrained(path).get_text_config()
    begin = [int(token) for token in args.begin.split(",") if token]
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    pairs = make_pairs(args.pairs, config, begin)
    prompts = [[*pair["clean"][: len(begin) + LENGTH], *pair["clean"][len(begin) :][:LENGTH]] for pair in pairs]
    scores, previous = scores_of(args.model, prompts, config, begin, engine)
    result = sweep_ablate(
        args.model,
        pairs,
        by=ABLATIONS,
        hooks="heads",
        positions="together",
        metrics="logprob",
        out=args.out,
        engine=engine,
        progress=lambda done, total: print(f"{done} of {total} runs", flush=True),
    )
    result.save(args.out)
    rises = rises_of(result, *scores.shape)
    picture = Path(args.images or args.out) / "induction_heads.png"
    draw(scores, previous, rises).savefig(picture, dpi=110, metadata={"Software": None})
    rows = [row for row in result.pairs.to_pylist() if row["metric"] == "logprob"]
    clean, corrupted = (-np.mean([row[name] for row in rows]) for name in ("clean", "corrupted"))
    print(f"loss in the second copy: {clean:.2f} nats; with another first copy: {corrupted:.2f}")
    print("head  prefix matching  previous token  rise of the loss: " + ", ".join(ABLATIONS))
    strongest = {*np.argsort(-scores, None)[:8].tolist(), *np.argsort(-rises["mean"], None)[:8].tolist()}
    for layer, head in zip(*np.unravel_index(sorted(strongest), scores.shape), strict=True):
        changes = "  ".join(f"{rises[name][layer, head]:6.2f}" for name in ABLATIONS)
        print(f"{layer:2}.{head}  {scores[layer, head]:15.2f}  {previous[layer, head]:14.2f}  {changes}")
    if args.senders:
        options: dict[str, Any] = {"layers": args.senders, "direction": "noise", "metrics": "logprob"}
        out = Path(args.out) / "paths"
        print_paths(sweep_path(args.model, pairs[:2], args.receivers, out=out, engine=engine, **options))
    summary = {
        "scores": scores.tolist(),
        "previous": previous.tolist(),
        "rises": {name: grid.tolist() for name, grid in rises.items()},
    }
    (Path(args.out) / "heads.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
