"""Opens a model of a back end by the back end's name."""

from __future__ import annotations

from typing import Any, Literal, get_args

from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow_engine.jobs import demo
from capflow_models.model import SteerableModel

Backend = Literal["vllm", "transformers"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def resolved_model(model: str) -> str:
    """Return the directory or the name of a model; `demo` is the demo model, which is made at its first use."""
    return demo.resolved(model)


def layer_count(model: str, *, trust_remote_code: bool = False) -> int:
    """Return the number of layers that a model's configuration gives."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolved_model(model), trust_remote_code=trust_remote_code)
    return int(config.get_text_config().num_hidden_layers)


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
