"""The autoencoders by whose features requests may be steered, loaded and checked before the model is.

Each API server loads them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.saes.named import digest_of, load_saes
from capflow.saes.resolve import check_steers
from capflow.saes.sae import Sae


def load_for(given: Sequence[str], info: Callable[[], ModelInfo], where: str) -> dict[str, Sae]:
    """Return autoencoders by name.

    given: for each `[NAME=]PATH[@SITE]`.
    info: returns the description of the model; called if an autoencoder is given.
    where: the option that has them, for errors.

    Raises UsageError for files that are no autoencoder, and for one that does not fit the model or its taps.
    """
    if not given:
        return {}
    saes = load_saes(given, where)
    check_steers(saes, info())
    return saes


def load_again(given: Sequence[str], info: ModelInfo, digest: str, where: str) -> dict[str, Sae]:
    """Return the autoencoders by name in an API server.

    digest: `digest_of` them when the server was started.
    given, where: as in `load_for`.

    Raises UsageError as `load_for` does, and for weights that have changed since.
    """
    saes = load_saes(given, where)
    check_steers(saes, info)
    if given and digest_of(saes) != digest:
        got, expected = "weights that have changed since the start", "the same in every API server"
        raise UsageError(explain(where, got=got, expected=expected, do="start the server again"))
    return saes
