"""Runs the code of notebooks: `python -m tests.kit.notebooks FILE…`, each in a process of its own.

The cells run in order in one module, as a kernel runs them, without IPython; each last expression is shown by its
`_repr_html_` or its repr. A notebook is run in its directory.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kit.sources import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    """Return the sources of a notebook's code cells."""
    page = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]


def execute(path: Path) -> None:
    """Run the cells; print what each shows."""
    os.chdir(path.parent)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(cells(path), 1):
        tree = ast.parse(source, f"{path.name}, cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval")
            value = eval(code, names)  # noqa: S307
            if value is not None:
                print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))


def run(path: Path) -> str:
    """Run a notebook in a process of its own; return what it printed."""
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # Threads that wait for each other would cost more than they bring for so small a model.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "tests.kit.notebooks", "--here", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{path.name}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        execute(Path(sys.argv[2]))
    else:
        for each in map(Path, sys.argv[1:]):
            print(f"{each.name}\n{run(each.absolute())}")
