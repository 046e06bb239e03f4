"""One engine with a directory for the rows that it captures: the life of the sessions of experiments and of sweeps."""

from __future__ import annotations

import difflib
import inspect
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import capflow
from capflow.errors import CapflowError, explain
from capflow.plugins.configure import escaped
from capflow_engine.compat import engine as compat
from capflow_models.backends import resolved_model


class EngineSession:
    """A running engine. Use it as a context manager. A subclass starts the engine with `_start`.

    out: the directory in which a new one for captured rows is made. It is removed at the end.
    prefix: how the name of the new directory begins.
    """

    def __init__(self, out: Path, prefix: str) -> None:
        self._running: capflow.LLM | None = None
        # What `close` undoes after the engine.
        self._undo = ExitStack()
        # How many requests and groups have names.
        self._number = 0
        self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=out))

    @property
    def rows(self) -> Path:
        """The data set of the captured rows."""
        return self._directory / "rows"

    @property
    def _keeper(self) -> str:
        """The consumer that writes the captured rows."""
        return f"filesystem:root={escaped(self.rows)},capture=requests,fsync=false"

    def _set(self, name: str, value: str) -> None:
        """Set an environment variable until `close`."""
        os.environ[name] = value
        self._undo.callback(os.environ.pop, name, None)

    def _start(self, model: str, engine: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Start the engine in this process, so a kill of this process ends it too.

        engine: the user's arguments of `capflow.LLM`.
        arguments: all of them.
        """
        name = resolved_model(model)
        compat.prepare_environment(engine)
        compat.run_in_this_process(engine)
        self._running = capflow.LLM(name, **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine, and remove the captured rows."""
        if self._running is not None:
            self._running.close()
            self._running = None
        self._undo.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def llm(self) -> capflow.LLM:
        """The engine."""
        assert self._running is not None
        return self._running

    def _outputs(self, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        """Run requests; return vLLM's outputs. Raises CapflowError for rows that were not captured."""
        outputs: list[Any] = self.llm.generate(list(prompts), list(params), use_tqdm=False)
        for output in outputs:
            result = output.capture_results.get("filesystem")
            if result is not None and result.status not in ("ok", "not_requested"):
                raise CapflowError(explain("captured rows", got=f"{result.status}: {result.error}"))
        return outputs

    def _next(self) -> int:
        """Return a number for the next name."""
        self._number += 1
        return self._number


def unknown_argument(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first argument that `capflow.LLM` does not have, and what to do; None if it has all."""
    names = compat.argument_names()
    for kind in capflow.LLM.__mro__:
        names |= inspect.signature(kind).parameters.keys() if kind is not object else set()
    for name in arguments:
        if name not in names:
            near = ", ".join(difflib.get_close_matches(name, names)) or "see the arguments of vllm.LLM"
            return name, f"near: {near}"
    return None
