"""Autoencoders by name, as options of the command line and of consumers give them: `NAME=PATH@SITE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.saes.load import load_sae, split_site
from capflow.saes.sae import Sae


def load_saes(given: str | Sequence[str], where: str) -> dict[str, Sae]:
    """Return autoencoders by name.

    given: for each `[NAME=]PATH[@SITE]`, or one; by default the name is that of the directory.
    where: the option that has them, for errors.

    Raises UsageError for files that are no autoencoder, and for a name that two of them have.
    """
    saes: dict[str, Sae] = {}
    for text in [given] if isinstance(given, str) else given:
        if not isinstance(text, str):
            raise UsageError(explain(where, got=text, expected="text: NAME=PATH@SITE"))
        name, equals, path = text.partition("=")
        if not equals:
            path = text
            place = Path(split_site(text)[0] or text)
            name = (place.parent if place.is_file() else place).absolute().name
        if not name or not path or len(name) > limits.STEERING_NAME_LENGTH_MAX or not name.isprintable():
            raise UsageError(explain(where, got=text, expected="NAME=PATH, or PATH"))
        if name in saes:
            expected = "each name once"
            raise UsageError(explain(where, got=f"{name} twice", expected=expected, do="give names: NAME=PATH"))
        saes[name] = load_sae(path)
        for site in (saes[name].site, saes[name].target):
            site.check_stream(f"{saes[name].where}: site")
    return saes


def digest_of(saes: Mapping[str, Sae]) -> str:
    """Return a number of autoencoders' names, sites and weights, in hexadecimal; it differs if one of these does."""
    digest = xxhash.xxh3_64()
    for name, sae in sorted(saes.items()):
        digest.update(f"{len(name)} {name} {sae.site} {sae.target} {sae.digest} {sae.decoder.shape}".encode())
        digest.update(sae.decoder.data)
    return digest.hexdigest()
