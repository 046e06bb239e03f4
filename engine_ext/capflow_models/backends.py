"""Opens a model of a back end by the back end's name; reads what identifies a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from capflow.capture.site import SHAPED_HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow_engine.jobs import demo
from capflow_models.model import SteerableModel

Backend = Literal["vllm", "transformers"]
BACKENDS: tuple[str, ...] = get_args(Backend)

_FILES = {".bin", ".gguf", ".jinja", ".json", ".model", ".pt", ".pth", ".safetensors"}
"""The suffixes of weights, configurations and tokenizers."""


def resolved_model(model: str) -> str:
    """Return the directory or the name of a model; `demo` is the demo model, which is made at its first use."""
    return demo.resolved(model)


def config_of(model: str, engine: Mapping[str, Any]) -> Any:
    """Return a model's configuration, of Transformers. Raises OSError or ValueError if there is none.

    engine: arguments of `vllm.LLM`.
    """
    from transformers import AutoConfig

    trusts, revision = bool(engine.get("trust_remote_code")), engine.get("revision") or "main"
    return AutoConfig.from_pretrained(resolved_model(model), trust_remote_code=trusts, revision=revision)


def layer_count(model: str, engine: Mapping[str, Any]) -> int:
    """Return the number of layers that a model's configuration gives.

    The arguments and errors are those of `config_of`.
    """
    return int(config_of(model, engine).get_text_config().num_hidden_layers)


def check_directions(model: str, arguments: Mapping[str, Any], directions: Iterable[tuple[str, Site, int]]) -> None:
    """Raise UsageError for a direction that does not fit a model's configuration; no weights are read.

    A model without a configuration is not refused here: its back end says what is wrong with it.

    arguments: of the back end.
    directions: for each what errors call it, its site, and how many numbers it has.
    """
    try:
        config = config_of(model, arguments).get_text_config()
        layers, width = int(config.num_hidden_layers), int(config.hidden_size)
    except (OSError, ValueError, AttributeError):
        return
    for name, site, size in directions:
        if site.layer >= layers:
            raise UsageError(explain(name, got=str(site), expected=f"a site of a layer of {model}, 0..{layers - 1}"))
        if size != width and site.hook not in SHAPED_HOOKS:
            expected = f"{width}, the width of {model}"
            raise UsageError(explain(f"{name}: {site}", got=f"{size} numbers", expected=expected))


def fingerprint(model: str, config: Any) -> str:
    """Return what changes with a model's weights and configuration.

    It is a digest of the names, sizes and times of a directory's files; the commit of a model of the hub.
    """
    path = Path(resolved_model(model))
    if not path.exists():
        return str(getattr(config, "_commit_hash", None) or "no commit")
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.suffix in _FILES)
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        status = file.stat()
        digest.update(f"{file.name}/{status.st_size}/{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def open_model(backend: Backend, model: str, arguments: dict[str, Any]) -> SteerableModel:
    """Return a model of a back end.

    model: a directory, a name, or `demo` for the demo model.
    arguments: further arguments of the back end's class.

    Raises UsageError for a back end that is unknown or not installed, a model that it cannot load, and invalid
    arguments.
    """
    if backend not in BACKENDS:
        raise UsageError(explain("--backend", got=backend, expected=f"one of {', '.join(BACKENDS)}"))
    require("vllm", f"--backend {backend}", backend, "torch")
    model = resolved_model(model)
    try:
        if backend == "vllm":
            from capflow_models.vllm_model import VLLMSteerableModel

            return VLLMSteerableModel(model, **arguments)
        from capflow_models.transformers_model import TransformersSteerableModel

        return TransformersSteerableModel(model, **arguments)
    except (TypeError, ValueError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(explain("--model-arg", got=str(e), expected=f"arguments of {backend}")) from e
