"""The autoencoders by whose features requests may be steered, loaded and checked before the model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capflow.capture.model import ModelInfo
from capflow.saes.named import load_saes
from capflow.saes.resolve import check_steers
from capflow.saes.sae import Sae
from capflow_engine.settings import Tapped


def load_for(given: Sequence[str], engine_args: Any, tapped: Tapped, where: str) -> dict[str, Sae]:
    """Return autoencoders by name.

    given: for each `[NAME=]PATH[@SITE]`.
    engine_args: vLLM's arguments of the engine.
    where: the option that has them, for errors.

    Raises UsageError for files that are no autoencoder, and for one that does not fit the model or its taps.
    """
    if not given:
        return {}
    saes = load_saes(given, where)
    width = engine_args.create_model_config().get_hidden_size()
    info = ModelInfo(engine_args.model, tapped.num_layers, width, "", tapped.sites, fixed=tapped.fixed)
    check_steers(saes, info)
    return saes
