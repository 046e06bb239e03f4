"""`python -m capflow_engine.compat.versions WHEEL…`: compare wheels with the surface table, a second each.

A folder that has `vllm/`, such as `site-packages`, is taken too.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from capflow.errors import explain
from capflow_engine.compat.versions.contract import Source, breaks, off
from capflow_engine.compat.versions.surface import CORE

_EXPECTED = "a wheel of vLLM, or a folder that has vllm/"


def main(names: list[str]) -> int:
    """Print what is missing in each; return 1 if a core name is in one, 2 for something that is no vLLM."""
    if not names:
        print(explain("no WHEEL given", expected=_EXPECTED), file=sys.stderr)
        return 2
    code = 0
    for name in names:
        problem: str | None = None
        try:
            source = Source.of(Path(name))
            if source.module("vllm") is None:
                problem = "no vllm/ in it"
        except (OSError, zipfile.BadZipFile) as e:
            problem = getattr(e, "strerror", None) or str(e)
        if problem is not None:
            print(explain(name, got=problem, expected=_EXPECTED), file=sys.stderr)
            return 2
        broken = off(breaks(source))
        print(f"{Path(name).name}: {'complete' if not broken else 'not complete'}")
        for need, each in broken.items():
            for one in each:
                print(f"  {need}: {one.name}: {one.problem}")
        code |= CORE in broken
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
