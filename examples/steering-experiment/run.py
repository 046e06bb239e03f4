"""Run the experiment beside this file, and say whether the gates did less harm than a vector that is always on.

    python examples/steering-experiment/run.py --out gate-or-not --pictures docs/images

A gated setting does less harm if the whole interval of the difference, at equal effect on the sad prompts, is below 0.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb

HERE = Path(__file__).resolve().parent
SHOWN = {"effect": "experiment_effect", "gate": "experiment_gate", "kl": "experiment_kl"}
"""The pictures of the documentation, by their names in the report."""


def main() -> None:
    """Run, print the comparison, and copy pictures; the exit code is 1 if no gate did less harm."""
    parser = argparse.ArgumentParser(description="Compare gates with a vector that is always on.")
    parser.add_argument("--out", type=Path, default=Path("gate-or-not"), help="the output directory")
    parser.add_argument("--pictures", type=Path, help="a directory to copy the documentation's pictures to")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "capflow", "experiment", "run", str(HERE / "experiment.toml")]
    subprocess.run([*command, "--out", str(arguments.out)], check=True)
    with duckdb.connect(str(arguments.out / "experiment.duckdb"), read_only=True) as database:
        rows = database.sql("SELECT * FROM matches ORDER BY setting").fetchall()
        columns = [name for name, *_ in database.sql("DESCRIBE matches").fetchall()]
    better = 0
    print("| setting | effect | harm | always on, same effect | difference |\n|---|---|---|---|---|")
    for row in rows:
        match = dict(zip(columns, row, strict=True))
        # An interval or a point that is not there is NULL.
        numbers = {name: math.nan if value is None else value for name, value in match.items()}
        cells = [
            f"{numbers[name]:.3f} ({numbers[f'{name}_low']:.3f} to {numbers[f'{name}_high']:.3f})"
            for name in ("effect", "harm", "other_harm", "difference")
        ]
        print(f"| {match['setting']} | {' | '.join(cells)} |")
        better += numbers["difference_high"] < 0
    if arguments.pictures:
        for name, title in SHOWN.items():
            shutil.copyfile(arguments.out / "plots" / f"{name}.png", arguments.pictures / f"{title}.png")
    sys.exit(0 if better else 1)


if __name__ == "__main__":
    main()
