"""vLLM's bodies of errors over HTTP, which are in another module before vLLM 0.29."""

from __future__ import annotations

try:
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
except ModuleNotFoundError:
    from vllm.entrypoints.openai.engine.protocol import ErrorInfo, ErrorResponse

__all__ = ["ErrorInfo", "ErrorResponse"]
