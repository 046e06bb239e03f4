"""What a request was promised, and what its files lack of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capflow.errors import explain
from capflow.result import RequestDone
from capflow.site import Site
from capflow.spec import Wanted
from capflow_consumers.requestfiles import RequestFiles, Runs
from capflow_consumers.storeddtype import FLOAT16_MAX

_RUNS_SHOWN_MAX = 8


def expected_of(wanted: Wanted | None, done: RequestDone) -> dict[Site, Runs]:
    """Return the positions that each wanted site must have rows of."""
    found = {
        positions: list(positions.at(done.prompt_length).runs(0, done.computed_length))
        for positions in {want.positions for want in (wanted or {}).values()}
    }
    return {site: runs for site, want in (wanted or {}).items() if (runs := found[want.positions])}


def problems_of(files: RequestFiles, rows: int, expected: Mapping[Site, Runs], done: RequestDone) -> Sequence[str]:
    """Return what the files lack of what was promised, one message each."""
    runs = files.runs
    problems = done.problems
    if rows != done.rows:
        problems.append(explain("rows written", got=rows, expected=f"{done.rows} as delivered"))
    for site, spans in sorted(expected.items()):
        got = runs.get(site, [])
        if got != spans:
            problems.append(explain(f"positions of {site}", got=_shown(got), expected=_shown(spans)))
    problems += [
        f"{count} rows of {site} have numbers beyond {FLOAT16_MAX:g}, the largest of float16; they are stored as infinite"
        for site, count in sorted(files.rows_overflowed.items())
        if count
    ]
    return problems


def _shown(runs: Runs) -> str:
    """Return runs as they stand in a message."""
    first = " ".join(f"{start}..{stop}" for start, stop in runs[:_RUNS_SHOWN_MAX])
    more = len(runs) - _RUNS_SHOWN_MAX
    return (first or "none") + (f" and {more} more" if more > 0 else "")
