"""Steerable models over vLLM or Hugging Face Transformers, steering vectors, and sweeps.

Users import it. A back end is imported at its first use.
Invariant: reading a specification needs neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Any

from capflow_models.model import Completion, SteerableModel
from capflow_models.spec import AblationSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec

__all__ = [
    "AblationSpec",
    "Completion",
    "LayerSteeringSpec",
    "ProjectionCapSpec",
    "SteerableModel",
    "SteeringSpec",
    "SweepResult",
    "TransformersSteerableModel",
    "VLLMSteerableModel",
    "fit_vectors",
    "load_vector",
    "load_vectors",
    "save_vectors",
    "sweep_ablate",
    "sweep_patch",
    "sweep_path",
]

_LATER = {
    "SweepResult": "capflow_models.sweep.results.result",
    "TransformersSteerableModel": "capflow_models.transformers_model",
    "VLLMSteerableModel": "capflow_models.vllm_model",
    "fit_vectors": "capflow_models.vectors.fit",
    "load_vector": "capflow_models.vectors.file",
    "load_vectors": "capflow_models.vectors.file",
    "save_vectors": "capflow_models.vectors.file",
    "sweep_ablate": "capflow_models.sweep.patch",
    "sweep_patch": "capflow_models.sweep.patch",
    "sweep_path": "capflow_models.sweep.patch",
}


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the names that need more than NumPy at their first use."""
    import importlib

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'capflow_models' has no attribute {name!r}")
