"""Packages that a command needs: checked before anything is started. None of them is imported here."""

from __future__ import annotations

from importlib.util import find_spec

from capflow.errors import UsageError, explain


def check_vllm(purpose: str = "", *, option: str = "") -> None:
    """Raise UsageError when vLLM is not installed.

    purpose: `to …`, for the message.
    option: the option that needs vLLM.
    """
    if find_spec("vllm") is None:
        problem = f"{option}: vLLM is not installed" if option else "vLLM is not installed"
        raise UsageError(explain(problem, do=f"pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]' {purpose}".rstrip()))


def check_sklearn() -> None:
    """Raise UsageError when scikit-learn is not installed."""
    if find_spec("sklearn") is None:
        raise UsageError(explain("scikit-learn is not installed", do="pip install 'capflow[probe]'"))
