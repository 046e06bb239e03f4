"""Make a linear probe from captured rows: the difference of the means of two groups of requests.

    python examples/make_probe.py demo-data/rows --site post_block:15 \
        --positive 'code-*' --negative 'story-*' --out code.safetensors

That is how examples/code.safetensors was made, from what `make demo` captures. With `--vector FILE` the difference itself is
written too, as a vector to steer with.

Reads what the filesystem consumer wrote. The direction is the mean row of the positive requests' tokens less that of the
negative ones', scaled so that a row at the positive mean scores 1 and one at the negative mean -1; the probe fires from 0
on. Every other request of each group is held out, and what the probe gets right on those is printed. The first
position is left out: models park a huge vector there that says nothing about the text.
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
    """Return the rows of each request whose id matches, `[tokens, hidden_size]` float32 each."""
    names = [name for name in sorted(data.requests()) if fnmatchcase(name, pattern)]
    found = [data[name][site] for name in names]
    return [np.asarray(rows.rows[rows.positions > 0], dtype=np.float32) for rows in found]


def main() -> None:
    """Read the rows, make the probe, say how good it is, and write it."""
    parser = argparse.ArgumentParser(description="Make a linear probe from captured rows.")
    parser.add_argument("rows", type=Path, help="the root of a captured data set")
    parser.add_argument("--site", required=True, type=capflow.Site.parse, help="e.g. post_block:15")
    parser.add_argument("--positive", required=True, help="ids of requests the probe should fire on, with *")
    parser.add_argument("--negative", required=True, help="ids of requests it should not fire on, with *")
    parser.add_argument("--out", required=True, type=Path, help="the probe file to write")
    parser.add_argument("--vector", type=Path, help="the vector file to write besides")
    given = parser.parse_args()

    data = capflow.open(given.rows)
    groups = [rows_of(data, pattern, given.site) for pattern in (given.positive, given.negative)]
    for pattern, group in zip((given.positive, given.negative), groups, strict=True):
        if len(group) < 2:
            sys.exit(f"make_probe: {len(group)} requests match {pattern}; at least 2 are needed, one to hold out")
    positive, negative = (np.concatenate(group[::2]).mean(axis=0, dtype=np.float64) for group in groups)
    difference = positive - negative
    weight = 2 * difference / (difference @ difference)
    bias = -float(weight @ (positive + negative)) / 2

    fires = [np.concatenate([rows @ weight for rows in group[1::2]]) + bias >= 0 for group in groups]
    print(f"held out: fires on {fires[0].mean():.0%} of {fires[0].size} tokens of {given.positive}")
    print(f"held out: fires on {fires[1].mean():.0%} of {fires[1].size} tokens of {given.negative}")
    Probe.make(given.site, weight, bias, names=[given.out.stem]).save(given.out)
    print(f"wrote {given.out}")
    if given.vector is not None:
        save_vector(given.vector, given.site, difference)
        print(f"wrote {given.vector}")


if __name__ == "__main__":
    main()
