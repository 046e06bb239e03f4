"""The size and the error of rows that are rounded to 8 bits, and what rounding costs a writer and a reader.

    PYTHONPATH=.:consumers:engine_ext python3 benchmarks/quantization.py --directory DISK

Size and error: the demo model (Gemma-3-270m, 640 numbers a row) in Transformers, in bfloat16, reads pages of docs/ and
    files of capflow/, in sequences of 512 tokens. Their rows go into shards of each kind, and are read back with
    `capflow.open`. The size is that of the shards, with all other columns. An error is that of a row as it is read,
    against the bfloat16 that was captured.

A probe: Fisher's linear discriminant of prose and code at one site, fitted to the exact rows of one half of the
    sequences, scores the rows of the other half, exact and rounded.

Cost: requests of 3.7 MB with rows of the model go into shards, as in `files.py`, beside a loop that writes the same
    bytes, without a sync. All take turns. Then each set is read from the page cache, every row, as float32.

Predicted: int8 has errors of 1 to 2 % where a row's largest number is ten times its mean, and far more where it is a
hundred times, as in the stream of Gemma. float8 has 2.6 % everywhere: half a step is 1/16 to 1/32, evenly spread.
A probe over 640 numbers averages that out: its score moves by less than 1 % of the spread of the scores. Rounding runs
at 1 to 3 GB/s, and half the bytes are hashed and written, so int8 costs a writer nothing.

Measured instead: see docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
import transformers
from files import HIDDEN, Took, compare, consumed, frames, plain, turn

import capflow
from capflow.capture.frame import Block, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import as_float32
from capflow_consumers.dataset.shards.quantization import quantised
from capflow_engine.jobs import demo

REPOSITORY = Path(__file__).parents[1]
LENGTH = 512
LAYERS = 18
SITES = (Site(4, "post_block"), Site(9, "post_block"), Site(15, "post_block"), Site(9, "mlp_in"))
PROBED = Site(9, "post_block")
KINDS: dict[str, dict[str, str]] = {
    "as captured": {},
    "int8": {"quantization": "int8"},
    "float8_e4m3": {"quantization": "float8_e4m3"},
}
Rows = np.ndarray[Any, np.dtype[Any]]


class Sequence(NamedTuple):
    """A sequence that the model read.

    rows: by site, `[LENGTH, HIDDEN]` bfloat16.
    """

    name: str
    is_code: bool
    token_ids: list[int]
    rows: dict[Site, Rows]


def sequences(each: int) -> Iterator[Sequence]:
    """Yield `each` sequences of prose and as many of code, in turns."""
    directory = demo.resolved("demo")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    every = [Site(layer, "post_block") for layer in range(LAYERS)]
    caught: dict[Site, Rows] = {}

    def keep(site: Site, value: Any) -> None:
        rows = (value[0] if isinstance(value, tuple) else value).detach().reshape(-1, HIDDEN)
        caught[site] = rows.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()

    layers = model.model.layers
    for site in every:
        layers[site.layer].register_forward_hook(lambda _, __, out, site=site: keep(site, out))
    normed = Site(9, "mlp_in")
    layers[9].mlp.register_forward_pre_hook(lambda _, args: keep(normed, args[0]))
    prose = " ".join(path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md")))
    code = "\n".join(path.read_text() for path in sorted((REPOSITORY / "capflow").rglob("*.py")))
    texts = {"prose": prose, "code": code}
    ids = {
        name: tokenizer(text[: each * LENGTH * 8], add_special_tokens=False)["input_ids"]
        for name, text in texts.items()
    }
    for number in range(each):
        for name, tokens in ids.items():
            part = [tokenizer.bos_token_id, *tokens[number * (LENGTH - 1) : (number + 1) * (LENGTH - 1)]]
            assert len(part) == LENGTH
            with torch.inference_mode():
                model.model(torch.tensor([part]))
            yield Sequence(f"{name}-{number}", name == "code", part, dict(caught))


def framed(read: list[Sequence], sites: tuple[Site, ...]) -> list[tuple[Frame, RequestDone]]:
    """Return each sequence as a frame with its rows at some sites, and the end of the request."""
    requests = []
    for number, one in enumerate(read, 1):
        payload = b"".join(one.rows[site].tobytes() for site in sites)
        header = FrameHeader(
            engine="engine",
            boot="boot",
            rank=Rank(0, 0, 0),
            seq=number,
            step=number,
            time_ns=0,
            dtype="bfloat16",
            hidden_size=HIDDEN,
            requests=(RequestRows(one.name, LENGTH, 0, tuple(one.token_ids)),),
            blocks=(Block(sites, LENGTH, (Span(0, 0, LENGTH, 0),)),),
            payload_bytes=len(payload),
        )
        rows = LENGTH * len(sites)
        done = RequestDone("engine", one.name, "stop", LENGTH, LENGTH, rows, rows, ())
        requests.append((Frame(header, payload), done))
    return requests


class Stored(NamedTuple):
    """A kind of rows as it was stored.

    row_bytes: bytes in shards for each row, by compression.
    rows: by site, as they are read, `[n, HIDDEN]` float32.
    """

    row_bytes: dict[str, float]
    rows: dict[Site, Rows]


def stored(read: list[Sequence], options: dict[str, str]) -> Stored:
    row_bytes, rows = {}, {}
    hooks = sorted({site.hook for site in SITES})
    for compression in ("none", "zstd"):
        with tempfile.TemporaryDirectory() as place:
            more = {"layout": "sharded", "compression": compression, "hooks": hooks, **options}
            consumed(Path(place), framed(read, SITES), fsync=False, **more)
            dataset = capflow.open(place)
            total = sum(path.stat().st_size for path in Path(place).glob("*.parquet"))
            row_bytes[compression] = total / sum(len(one.token_ids) * len(SITES) for one in read)
            for site in SITES:
                parts = [as_float32(dataset[one.name][site].rows) for one in read]
                rows[site] = np.concatenate(parts)
    return Stored(row_bytes, rows)


def percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def errors(read: list[Sequence]) -> None:
    kinds = {name: stored(read, options) for name, options in KINDS.items()}
    exact = kinds["as captured"].rows
    print(f"{len(read) * LENGTH} rows at each of {len(SITES)} sites\n")
    print("| stored as | bytes a row | with zstd |\n|---|---|---|")
    for name, kind in kinds.items():
        print(f"| {name} | {kind.row_bytes['none']:.0f} | {kind.row_bytes['zstd']:.0f} |")
    print(
        "\n| site | stored as | relative L2 error: median | worst | without the largest"
        " | cosine: median | worst | largest error |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for site in SITES:
        rows = exact[site].astype(np.float64)
        norms, largest = np.linalg.norm(rows, axis=1), np.abs(rows).max(axis=1)
        others = np.abs(rows) < largest[:, None]
        for name in list(KINDS)[1:]:
            rounded = kinds[name].rows[site].astype(np.float64)
            relative = np.linalg.norm(rounded - rows, axis=1) / norms
            rest = np.linalg.norm((rounded - rows) * others, axis=1) / np.linalg.norm(rows * others, axis=1)
            cosine = (rounded * rows).sum(axis=1) / norms / np.linalg.norm(rounded, axis=1)
            furthest = (np.abs(rounded - rows).max(axis=1) / largest).max()
            middles = percent(float(np.median(relative))), percent(float(np.median(rest)))
            row = f"{middles[0]} | {percent(relative.max())} | {middles[1]}"
            print(f"| `{site}` | {name} | {row} | {np.median(cosine):.5f} | {cosine.min():.5f} | {percent(furthest)} |")
    probe(read, {name: kind.rows[PROBED] for name, kind in kinds.items()})


def probe(read: list[Sequence], rows: dict[str, Rows]) -> None:
    is_code = np.repeat([one.is_code for one in read], LENGTH)
    usable = np.tile(np.arange(LENGTH) > 0, len(read))  # without the first token, whose row is the same in all
    fitted = np.repeat(np.arange(len(read)) < len(read) // 2, LENGTH) & usable
    tested = ~np.repeat(np.arange(len(read)) < len(read) // 2, LENGTH) & usable
    exact = rows["as captured"].astype(np.float64)
    both = [exact[fitted & is_code], exact[fitted & ~is_code]]
    means = [part.mean(axis=0) for part in both]
    spread = sum(np.cov(part, rowvar=False) for part in both)
    # A tenth of the mean variance keeps the numbers that hardly vary from deciding.
    ridge = 0.1 * np.trace(spread) / HIDDEN * np.eye(HIDDEN)
    direction = np.linalg.solve(spread + ridge, means[0] - means[1])
    labels = is_code[tested]
    print(f"\n| `{PROBED}` | AUC of the probe | its scores move by, in standard deviations: median | worst |")
    print("|---|---|---|---|")
    scores = {name: each.astype(np.float64)[tested] @ direction for name, each in rows.items()}
    for name, score in scores.items():
        moved = np.abs(score - scores["as captured"]) / scores["as captured"].std()
        print(f"| {name} | {auc(score, labels):.5f} | {np.median(moved):.2g} | {moved.max():.2g} |")


def auc(scores: Rows, labels: Rows) -> float:
    """Return the share of pairs of a positive and a negative that the scores order."""
    ranks = np.argsort(np.argsort(scores))[labels].sum()
    positives, negatives = int(labels.sum()), int((~labels).sum())
    return float((ranks - positives * (positives - 1) / 2) / (positives * negatives))


def rounding(rows: Rows, turns: int) -> None:
    """Print how fast rows `[n, HIDDEN]` are rounded, beside a copy of them."""
    runs: dict[str, Any] = {"copy": rows.copy}
    runs |= {name: lambda name=name: quantised(rows, name) for name in ("int8", "float8_e4m3")}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            begun = Took.now()
            run()
            times[name].append(begun.until_now().cpu_s)
    for name, took in times.items():
        seconds = statistics.median(took)
        rate = f"{len(rows) / seconds / 1e6:5.2f} million rows/s, {rows.nbytes / seconds / 1e6:6.0f} MB/s of bfloat16"
        print(f"{'round ' + str(len(rows)) + ' rows':24} {name:12} {rate} of processor time", flush=True)


def cost(read: list[Sequence], directory: Path, turns: int, megabytes: int) -> None:
    tokens = 160
    payload = b"".join(read[0].rows[Site(layer, "post_block")][:tokens].tobytes() for layer in range(LAYERS))
    rounding(np.frombuffer(payload, ml_dtypes.bfloat16).reshape(-1, HIDDEN), 5 * turns)
    requests = list(frames(max(4, megabytes * 1_000_000 // len(payload)), LAYERS, tokens, payload))
    total = len(requests) * len(payload) / 1e6
    runs: dict[str, Any] = {"plain": lambda: turn(directory, lambda place: plain(place, requests, fsync=False))}
    choices = {
        f"{name} {compression}": {**options, "compression": compression}
        for compression in ("none", "zstd")
        for name, options in KINDS.items()
    }
    for name, options in choices.items():
        runs[name] = lambda o=options: turn(
            directory, lambda place: consumed(place, requests, fsync=False, layout="sharded", **o)
        )
    compare("write 3.7 MB a request", "MB/s", total, len(requests), turns, runs)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        readers: dict[str, Any] = {}
        for name, options in choices.items():
            root = Path(place) / name.replace(" ", "-")
            consumed(root, requests, fsync=False, layout="sharded", **options)
            readers[name] = lambda root=root: reading(root)
        compare("read as float32, in memory", "MB/s", total, len(requests), turns, readers)


def reading(root: Path) -> Took:
    begun = Took.now()
    for capture in capflow.open(root):
        for site in capture.sites:
            as_float32(capture[site].rows)
    return begun.until_now()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=8, help="of prose, and as many of code")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=60, help="that each turn writes")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    read = list(sequences(args.sequences))
    errors(read)
    print()
    cost(read, args.directory, args.turns, args.megabytes)


if __name__ == "__main__":
    main()
