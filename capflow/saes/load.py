"""Loading an autoencoder by the name that a user gives: a directory or a file, and maybe its site.

`DIR@post_block:12` says the site, `DIR@mlp_in:12/mlp_out:12` the two sites of a transcoder.
"""

from __future__ import annotations

import os
from pathlib import Path

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes import saelens
from capflow.saes import gemma_scope, sparsify
from capflow.saes.gemma_scope import read_gemma_scope
from capflow.saes.sae import Sae
from capflow.saes.saelens import read_saelens
from capflow.saes.sparsify import read_sparsify
from capflow.saes.tensors import Sites

_WEIGHTS = (saelens.WEIGHTS_NAME, sparsify.WEIGHTS_NAME, gemma_scope.FILE_NAME)


def load_sae(path: str | os.PathLike[str], site: str | None = None) -> Sae:
    """Return the autoencoder or transcoder in a directory or file of SAELens, sparsify or Gemma Scope.

    path: the directory, or its file of weights; `DIR@SITE` says the site too.
    site: `HOOK:LAYER`; for a transcoder `HOOK:LAYER/HOOK:LAYER`, of which it reads the first. By default the one in the
        files or in the path.

    Raises UsageError, which begins with the file, if it is of another format, damaged, or computes its activations in
    another way than `Sae` does.
    """
    where = os.fspath(path)
    if site is None:
        where, site = split_site(where)
    sites = None if site is None else _sites(site, where)
    place = Path(where)
    if not place.exists():
        raise UsageError(explain(where, got="no such directory", expected=f"one with {', '.join(_WEIGHTS)}"))
    if place.suffix == ".npz":
        return read_gemma_scope(place, sites)
    directory = place.parent if place.name in _WEIGHTS else place
    if (directory / saelens.WEIGHTS_NAME).is_file():
        return read_saelens(directory, sites)
    if (directory / sparsify.WEIGHTS_NAME).is_file():
        return read_sparsify(directory, sites)
    if (directory / gemma_scope.FILE_NAME).is_file():
        return read_gemma_scope(directory / gemma_scope.FILE_NAME, sites)
    raise UsageError(explain(where, got="no autoencoder", expected=f"a directory with one of {', '.join(_WEIGHTS)}"))


def split_site(path: str) -> tuple[str, str | None]:
    """Return the path in `PATH@SITE` and the site; a text that is the path of something that exists has no site."""
    place, at, site = path.rpartition("@")
    return (place, site) if at and not Path(path).exists() else (path, None)


def _sites(text: str, where: str) -> Sites:
    source, slash, target = text.partition("/")
    try:
        site = Site.parse(source)
        return Sites(site, Site.parse(target) if slash else site)
    except UsageError as e:
        raise UsageError(f"{where}: {e}") from e
