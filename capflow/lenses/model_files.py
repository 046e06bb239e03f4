"""The files of a model on this machine: where they are, its configuration and its tensors.

A model's name is a directory, or the name of a repository in the local Hugging Face cache, or `demo`. Names come from
engines, so a name is never a path out of the cache, and no file is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

# Lets NumPy, and so safetensors, know bfloat16.
import ml_dtypes  # noqa: F401
import msgspec
from safetensors import SafetensorError, safe_open

from capflow import limits
from capflow.errors import UsageError, explain

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")
_DEMO = "gemma-3-270m-*"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class ModelFiles:
    """A model's directory.

    config: the content of `config.json`.
    signature: changes when a file that is read here changes.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = config
        # The file of each tensor.
        self._places = _places(directory)

    @property
    def signature(self) -> tuple[Any, ...]:
        """The identity of the files: of each its name, device, inode, size and time."""
        names = sorted({"config.json", "tokenizer.json", *self._places.values()})
        return (str(self.directory), *(file_identity(self.directory / name) for name in names))

    def has(self, name: str) -> bool:
        """Return whether a tensor is there."""
        return name in self._places

    def tensor(self, name: str) -> Any:
        """Return a tensor that is read as it is sliced: `get_shape`, and `[first:end]` as an array of its dtype.

        Raises UsageError if the file is damaged, and for a dtype other than float32, float16 and bfloat16.
        """
        path = self.directory / self._places[name]
        try:
            file: Any = safe_open(path, "numpy")
            tensor = file.get_slice(name)
        except (SafetensorError, OSError) as e:
            raise UsageError(explain(f"{path}", got=_line(e), expected="whole safetensors")) from e
        if tensor.get_dtype() not in _DTYPES:
            raise UsageError(
                explain(f"{path}: {name}", got=tensor.get_dtype(), expected=f"one of {', '.join(_DTYPES)}")
            )
        return tensor


def open_model(name: str) -> ModelFiles:
    """Return the files of a model. Raises UsageError if they are not on this machine, or cannot be used."""
    directory = _directory(name)
    content = read_json(directory / "config.json")
    try:
        config = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(explain(f"{directory / 'config.json'}", got=_line(e), expected="a configuration")) from e
    return ModelFiles(directory, config)


def read_json(path: Path) -> bytes:
    """Return the content of a JSON file. Raises UsageError if it is too large or cannot be read."""
    try:
        if path.stat().st_size > limits.MODEL_JSON_BYTES_MAX:
            expected = f"at most {limits.MODEL_JSON_BYTES_MAX} bytes"
            raise UsageError(explain(f"{path}", got=f"{path.stat().st_size} bytes", expected=expected))
        return path.read_bytes()
    except OSError as e:
        raise UsageError(explain(f"{path}", got=e.strerror or str(e), expected="a readable file")) from e


def _directory(name: str) -> Path:
    """Return the directory with a model's `config.json`."""
    if name == "demo":
        return _demo()
    if name.endswith(".gguf"):
        raise UsageError(explain("lens: the model's files", got=f"{name}, GGUF", expected="safetensors"))
    # A name may be too long for the system.
    with contextlib.suppress(OSError, ValueError):
        if name and (Path(name) / "config.json").is_file():
            return Path(name)
        if _REPOSITORY.fullmatch(name) and (snapshot := _snapshot(name)) is not None:
            return snapshot
    expected = "a directory with config.json, or a name in the Hugging Face cache of this machine"
    raise UsageError(explain("lens: the model's files", got=f"{name}, which is not here", expected=expected))


def _snapshot(name: str) -> Path | None:
    """Return the main revision of a repository in the cache, or its only one; None if there is neither."""
    repository = _cache() / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        revision = main.read_text(encoding="utf-8").strip()
        made = [repository / "snapshots" / revision / "config.json"] if re.fullmatch(r"\w+", revision) else []
    else:
        made = list(repository.glob("snapshots/*/config.json"))
    return made[0].parent if len(made) == 1 and made[0].is_file() else None


def _demo() -> Path:
    """Return the directory of the demo model; the newest, if several versions of capflow have prepared one."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    models = Path(base) / "capflow" / "models"
    made = sorted(models.glob(f"{_DEMO}/config.json"), key=lambda path: path.stat().st_mtime_ns)
    if not made:
        raise UsageError(explain("lens: the demo model", got="none", expected=f"{models}/{_DEMO}"))
    return made[-1].parent


def _cache() -> Path:
    """Return the directory of the Hugging Face cache, as the library `huggingface_hub` finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").expanduser() / "hub"


def _places(directory: Path) -> dict[str, str]:
    """Return the file of each tensor of a directory."""
    if (directory / _INDEX).is_file():
        try:
            places = msgspec.json.decode(read_json(directory / _INDEX), type=_Index).weight_map
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise UsageError(explain(f"{directory / _INDEX}", got=_line(e), expected="an index of tensors")) from e
        if any(Path(file).name != file for file in places.values()):
            raise UsageError(explain(f"{directory / _INDEX}", got="a path", expected="names of files beside it"))
        return places
    path = directory / _WEIGHTS
    if not path.is_file():
        raise UsageError(explain(f"lens: {directory}", got=f"no {_WEIGHTS}", expected="weights as safetensors"))
    try:
        with safe_open(path, "numpy") as file:
            return dict.fromkeys(file.keys(), _WEIGHTS)
    except (SafetensorError, OSError) as e:
        raise UsageError(explain(f"{path}", got=_line(e), expected="whole safetensors")) from e


def file_identity(path: Path) -> tuple[str, int, int, int, int] | None:
    """Return what differs when a file is replaced or written: name, device, inode, size, time; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
