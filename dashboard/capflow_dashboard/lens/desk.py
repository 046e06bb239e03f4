"""The desk: answers the pages' asks for lenses, through one process that it starts and ends.

It runs in the server's event loop, which it never blocks. Asks are answered one after another. The process is started
by the first ask, ended when it has been idle for `limits.LENS_IDLE_S`, and killed if an answer takes longer than
`limits.LENS_S_MAX`. Invariant: a process that owes an answer is not asked again; it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import msgspec
import numpy as np

from capflow.capture.site import HOOK_DEFAULT
from capflow.errors import CapflowError, UsageError, explain
from capflow.lenses.file import LensFile, blocks_before
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board
from capflow_dashboard.lens.messages import LENGTH, LensTask, LensTokens, Token
from capflow_dashboard.lens.rows import KeptRows
from capflow_dashboard.wire import TokenAsk


class LensDesk:
    """Answers asks until `close`.

    board: knows which request a key is.
    rows: the rows that are kept.
    file: the lens file; None for the logit lens.
    other_weights: whether it may be of other weights of the model's sizes.
    """

    def __init__(
        self, board: Board, rows: KeptRows, file: LensFile | None = None, *, other_weights: bool = False
    ) -> None:
        self._board = board
        self._rows = rows
        self._file = file
        self._other_weights = other_weights
        # Held by the ask that the process works on.
        self._lock = asyncio.Lock()
        # Set while there is a process.
        self._process: asyncio.subprocess.Process | None = None
        # No process is started any more.
        self._closed = False
        # Ends an idle process.
        self._idle: asyncio.TimerHandle | None = None

    @property
    def title(self) -> str:
        """The kind of the lens, for people."""
        return "Logit lens" if self._file is None else self._file.title

    @property
    def pid(self) -> int | None:
        """The id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def answer(self, ask: TokenAsk) -> dict[str, Any]:
        """Return the answer to an ask, as `capflow_dashboard.wire` describes it. Errors are in its `error`."""
        fields = {"id": ask.id, "request": ask.request, "position": ask.position}
        try:
            return {**fields, "layers": await self._layers(ask), "error": ""}
        except CapflowError as e:
            return {**fields, "layers": [], "error": str(e)}

    async def close(self) -> None:
        """End the process. An ask that waits for it is answered with an error."""
        self._closed = True
        process = self._process
        self._kill()
        if process is not None:
            await process.wait()

    async def _layers(self, ask: TokenAsk) -> list[dict[str, Any]]:
        owner = self._board.owner(ask.request)
        if owner is None:
            raise CapflowError(explain("lens", got=f"request {ask.request}", expected="a request that is shown"))
        sites = [site for site in owner.sites if site.hook == HOOK_DEFAULT]
        if sites and self._file is not None:
            file = self._file
            sites = [site for site in sites if blocks_before(site) in {*file.blocks, file.origin.num_layers}]
            if not sites:
                got = ", ".join(str(site) for site in owner.sites[:4])
                expected = f"layers that {file.where} translates"
                raise UsageError(explain("lens", got=f"rows of {got}", expected=expected))
        if not sites:
            do = f"capture {HOOK_DEFAULT}"
            got = f"rows of {', '.join(sorted({site.hook for site in owner.sites})) or 'no site'}"
            raise CapflowError(explain("lens", got=got, expected="the stream after a block", do=do))
        rows = self._rows.find(owner.engine, owner.request, owner.incarnation, ask.position, sites)
        if not rows:
            expected = f"one of the newest {limits.KEPT_ROWS_BYTES_MAX // limits.MIB} MiB of rows"
            got = f"position {ask.position}, whose rows are not kept"
            raise CapflowError(explain("lens", got=got, expected=expected))
        order = sorted(rows)
        stacked = np.stack([rows[site] for site in order])
        if stacked.shape[1] != owner.model.hidden_size:
            got, expected = f"rows of width {stacked.shape[1]}", f"width {owner.model.hidden_size}"
            raise CapflowError(explain("lens", got=got, expected=expected))
        model = owner.model
        # A data set has only the layers that were captured.
        whole = self._board.source[0] != "stored"
        layers = tuple(site.layer for site in order)
        sizes = (model.name, model.num_layers, model.hidden_size, whole)
        lens = ("" if self._file is None else self._file.where, self._other_weights)
        task = LensTask(*sizes, *lens, layers, stacked.tobytes())
        tokens = await self._ask(task)
        return [
            {"layer": site.layer, "site": str(site), "tokens": row} for site, row in zip(order, tokens, strict=True)
        ]

    async def _ask(self, task: LensTask) -> list[list[Token]]:
        """Return the process's answer. Raises CapflowError for its error, and if it is killed."""
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(limits.LENS_S_MAX):
                    answer = await self._exchange(task)
            except TimeoutError as e:
                self._kill()
                got = f"more than {limits.LENS_S_MAX:g} s"
                raise CapflowError(explain(f"lens of {task.model}: time", got=got)) from e
            except (OSError, EOFError) as e:
                got = str(e) if self._process is None else await self._end(self._process)
                raise CapflowError(explain(f"lens of {task.model}: its process", got=got)) from e
            except BaseException:
                # The page was closed; the answer, which nobody reads, must not be read as that to another ask.
                self._kill()
                raise
            self._idle = asyncio.get_running_loop().call_later(limits.LENS_IDLE_S, self._kill)
        if answer.error:
            raise CapflowError(answer.error)
        return answer.rows

    async def _exchange(self, task: LensTask) -> LensTokens:
        """Send a task and return the answer. Raises EOFError or OSError if the process ends."""
        if self._process is not None and self._process.returncode is not None:
            self._process = None
        if self._process is None:
            if self._closed:
                raise CapflowError(explain("lens", got="the end of the dashboard"))
            self._process = await _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        content = msgspec.msgpack.encode(task)
        process.stdin.write(LENGTH.pack(len(content)) + content)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=LensTokens)

    async def _end(self, process: asyncio.subprocess.Process) -> str:
        """Return how a process ended that does not answer any more; kill it if it did not."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.OPEN_S_MAX):
                    await process.wait()
        finally:
            self._kill()
        code = await process.wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _kill(self) -> None:
        """Kill the process; the event loop's watcher reaps it."""
        if self._idle is not None:
            self._idle.cancel()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            # `process.kill` would reap a process that has ended just now, and asyncio not learn how it ended.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


async def _start() -> asyncio.subprocess.Process:
    # One thread, so that it takes at most one core.
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "capflow_dashboard.lens.job",
        str(limits.LENS_BYTES_MAX),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Errors are answers. Whatever else a library says must not stand between the lines of the hub's log.
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | one,
    )
