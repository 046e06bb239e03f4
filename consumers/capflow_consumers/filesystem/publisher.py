"""Making a finished request part of the data set: its rows and its sidecar, on the thread of `Endings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import capflow
from capflow.capture.result import CaptureResult, RequestDone, Status
from capflow.capture.site import Site
from capflow.capture.spec import Wanted
from capflow.errors import CapflowError, FatalError, RetryError, explain
from capflow_consumers.dataset import disk, layout
from capflow_consumers.dataset.stored_dtype import FLOAT16_MAX
from capflow_consumers.filesystem.files import RequestFiles, Runs
from capflow_consumers.filesystem.request import FiledRequest
from capflow_consumers.filesystem.store import Store, Written
from capflow_consumers.filesystem.workdir import OnCollision


class Over(NamedTuple):
    """A finished request whose files are prepared.

    expected: the positions that it must have rows of, by site.
    model: the name of its model.
    """

    request: FiledRequest
    done: RequestDone
    expected: Mapping[Site, Runs]
    model: str


class Publisher:
    """Makes requests part of a data set.

    failed: called for each request that cannot become part of it.
    """

    def __init__(self, store: Store, on_collision: OnCollision, failed: Callable[[], None]) -> None:
        self._store = store
        self._on_collision = on_collision
        self._failed = failed
        # Requests that were renamed and may not be durable yet, by the path of their files.
        self._placed: dict[Path, Written] = {}

    def write(self, over: Over) -> Written | CaptureResult:
        """Write a request; return the result when it can never be written.

        The request stays prepared, so that it can be written again.

        Raises RetryError and MemoryError when the disk refuses it for now, and FatalError when the data set must be
        opened again.
        """
        files = over.request.files
        if (placed := self._placed.get(files.path)) is not None:
            return placed
        try:
            return self._put(*over)
        except MemoryError:
            files.undo()
            raise
        except (OSError, CapflowError) as e:
            error = self._kind(e)
            if isinstance(error, RetryError | FatalError):
                files.undo()
                raise error from e
            return self.give_up(files, e)

    def publish(self, group: Sequence[Written]) -> list[CaptureResult | BaseException]:
        """Give written requests their names; return of each the result, or the error for which it is written again."""
        outcomes = self._store.publish(group)
        return [self._judged(*each) for each in zip(group, outcomes, strict=True)]

    def _judged(self, written: Written, outcome: Path | OSError | CapflowError) -> CaptureResult | BaseException:
        files = written.files
        if isinstance(outcome, Path):
            self._placed.pop(files.path, None)
            files.release()
            return result_of(self._store.place(outcome), written.sidecar)
        error = self._kind(outcome)
        if isinstance(error, FatalError):
            return error
        if not isinstance(error, RetryError):
            return self.give_up(files, outcome)
        if self._store.is_named(files):
            self._placed[files.path] = written
        elif files.early:  # early rows may be gone from the disk, and are no longer in memory
            do = "the hub opens the data set again and delivers the rows again"
            return FatalError(explain("rows that were written early", got=str(outcome), do=do))
        return error

    def _kind(self, error: OSError | CapflowError) -> OSError | CapflowError:
        return disk.judged(self._store.work.root, error) if isinstance(error, OSError) else error

    def give_up(self, files: RequestFiles, error: OSError | CapflowError) -> CaptureResult:
        """Remove the files of a request; return its result."""
        files.discard()
        self._failed()
        message = disk.refused(self._store.work.root, error) if isinstance(error, OSError) else str(error)
        return CaptureResult("error", message)

    def _put(self, request: FiledRequest, done: RequestDone, expected: Mapping[Site, Runs], model: str) -> Written:
        files, store = request.files, self._store
        on_collision = self._collision(done)
        capture = store.number(done.engine, done.request, on_collision)
        entries = files.write()
        rows = sum(entry.rows for entry in entries)
        problems = problems_of(files, rows, expected, done)
        status: Status = "ok" if not problems else "partial_error" if rows else "error"
        sidecar = layout.Sidecar(
            format=layout.FORMAT_SHAPED if any(entry.shape for entry in entries) else layout.FORMAT,
            capflow=capflow.__version__,
            request=done.request,
            engine=done.engine,
            model=model,
            dtype=files.dtype,
            hidden_size=files.hidden_size,
            prompt_length=done.prompt_length,
            computed_length=done.computed_length,
            status=done.status,
            capture_status=status,
            error="; ".join(problems) or None,
            dropped=[(dropped.rows, dropped.reason) for dropped in done.dropped],
            rows=rows,
            budget_reached=done.budget_reached,
            sites=entries,
            texts=[layout.TokenRun(start, texts) for start, texts in request.tokens.texts()],
            sources=[layout.FrameRange(*worker, first, last) for worker, first, last in request.frames.runs()],
            layout=files.kept_as,
            capture=capture,
            tag=done.tag,
            steered=request.steered_runs,
            events=request.events.take(request.incarnation),
            events_lost=request.events.lost,
            adapter=done.adapter,
            weights=list(done.weights),
        )
        return store.put(files, sidecar, layout.write_sidecar(sidecar), on_collision)

    def _collision(self, done: RequestDone) -> OnCollision:
        """Return what to do on a collision: `suffix` for the rest of a request whose worker was taken for gone."""
        begun = any(sidecar.status == "error" for _, sidecar in self._store.captures(done.engine, done.request))
        return "suffix" if begun else self._on_collision


def result_of(place: Mapping[str, Any], sidecar: layout.Sidecar) -> CaptureResult:
    """Return the result of a request.

    place: as `Store.place` returns it.
    """
    size = sum(entry.bytes for entry in sidecar.sites)
    files = len({entry.file for entry in sidecar.sites})
    payload = {**place, "rows": sidecar.rows, "bytes": size, "files": files}
    return CaptureResult(sidecar.capture_status, sidecar.error, payload)


_RUNS_SHOWN_MAX = 8


def expected_of(wanted: Wanted | None, done: RequestDone) -> dict[Site, Runs]:
    """Return the positions that each wanted site must have rows of."""
    runs_of = {
        positions: list(positions.at(done.prompt_length).runs(0, done.computed_length))
        for positions in {want.positions for want in (wanted or {}).values()}
    }
    return {site: runs for site, want in (wanted or {}).items() if (runs := runs_of[want.positions])}


def problems_of(files: RequestFiles, rows: int, expected: Mapping[Site, Runs], done: RequestDone) -> Sequence[str]:
    """Return a message for each way in which the files do not hold what was promised."""
    runs = files.runs
    problems = done.problems
    if rows != done.rows:
        problems.append(explain("rows written", got=rows, expected=f"{done.rows} as delivered"))
    for site, spans in sorted(expected.items()):
        got = runs.get(site, [])
        if got != spans:
            problems.append(explain(f"positions of {site}", got=_shown(got), expected=_shown(spans)))
    problems += [
        f"{count} rows of {site} have numbers beyond float16's {FLOAT16_MAX:g}, which are stored as infinite"
        for site, count in sorted(files.rows_overflowed.items())
        if count
    ]
    return problems


def _shown(runs: Runs) -> str:
    """Format runs for a message."""
    first = " ".join(f"{start}..{stop}" for start, stop in runs[:_RUNS_SHOWN_MAX])
    more = len(runs) - _RUNS_SHOWN_MAX
    return (first or "none") + (f" and {more} more" if more > 0 else "")
