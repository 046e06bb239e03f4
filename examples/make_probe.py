"""Make a linear probe from captured rows: the difference of the means of two groups of requests.

    python examples/make_probe.py demo-data/rows --site post_block:15 \
        --positive 'code-*' --negative 'story-*' --out code.safetensors

This command made examples/code.safetensors from the rows that `make demo` captures. With `--vector FILE` the difference
is also written as a vector to steer with.

It reads a data set of the filesystem consumer. The direction is the mean row of the positive requests' tokens minus
that of the negative ones'. It is scaled so that the positive mean scores 1 and the negative mean -1; the probe fires
from 0 on. Every other request of each group is held out, and the share of held-out tokens on which the probe fires is
printed. The first position is left out: models have a huge vector there that does not depend on the text.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import capflow
from capflow import Probe, save_vector

Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def rows_of(data: Any, pattern: str, site: capflow.Site) -> list[Rows]:
    """Return the rows `[tokens, hidden_size]`, float32, of each request whose id matches."""
    captures = [data[name][site] for name in sorted(data.requests()) if fnmatchcase(name, pattern)]
    return [np.asarray(capture.rows[capture.positions > 0], dtype=np.float32) for capture in captures]


def main() -> None:
    """Read the rows, make the probe, print how well it separates held-out tokens, and write it."""
    parser = argparse.ArgumentParser(description="Make a linear probe from captured rows.")
    parser.add_argument("rows", type=Path, help="the root of a captured data set")
    parser.add_argument("--site", required=True, type=capflow.Site.parse, help="e.g. post_block:15")
    parser.add_argument("--positive", required=True, help="ids of requests on which the probe should fire, with *")
    parser.add_argument("--negative", required=True, help="ids of requests on which it should not fire, with *")
    parser.add_argument("--out", required=True, type=Path, help="the probe file to write")
    parser.add_argument("--vector", type=Path, help="a vector file to write too")
    arguments = parser.parse_args()

    data = capflow.open(arguments.rows)
    groups = [rows_of(data, pattern, arguments.site) for pattern in (arguments.positive, arguments.negative)]
    for pattern, group in zip((arguments.positive, arguments.negative), groups, strict=True):
        if len(group) < 2:
            sys.exit(f"make_probe: {len(group)} requests match {pattern}; at least 2 are needed, one to hold out")
    positive, negative = (np.concatenate(group[::2]).mean(axis=0, dtype=np.float64) for group in groups)
    difference = positive - negative
    weight = 2 * difference / (difference @ difference)
    bias = -float(weight @ (positive + negative)) / 2

    fires = [np.concatenate([rows @ weight for rows in group[1::2]]) + bias >= 0 for group in groups]
    print(f"held out: fires on {fires[0].mean():.0%} of {fires[0].size} tokens of {arguments.positive}")
    print(f"held out: fires on {fires[1].mean():.0%} of {fires[1].size} tokens of {arguments.negative}")
    Probe.make(arguments.site, weight, bias, names=[arguments.out.stem]).save(arguments.out)
    print(f"wrote {arguments.out}")
    if arguments.vector is not None:
        save_vector(arguments.vector, arguments.site, difference)
        print(f"wrote {arguments.vector}")


if __name__ == "__main__":
    main()
