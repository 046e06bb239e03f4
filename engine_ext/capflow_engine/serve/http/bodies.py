"""The bodies of the routes that take capflow's fields: vLLM's, with these fields."""

# No postponed annotations: FastAPI reads these.

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from capflow_engine.request.options import KEY, PackedOptions
from capflow_engine.serve.fields import FIELDS

_VECTORS = "Vectors to add to the residual stream, by hook and layer: lists of numbers, or packed."
_FEATURES = "Features of a sparse autoencoder to add or to set, by its name and their numbers."
_CLAMPS = "Bounds on the stream's projection onto directions, by hook and layer."


class Fields(BaseModel):
    """Capflow's fields of a body. Their values are checked against the model before anything runs."""

    capture: Any = Field(default=None, description="Which sites and positions to capture.")
    capture_id: Any = Field(default=None, description="The name of the request; by default the response's id.")
    capture_wait: Any = Field(default=None, description="Whether the response waits for the consumers.")
    steering_vectors: Any = Field(default=None, description=_VECTORS)
    prefill_steering_vectors: Any = Field(default=None, description=f"{_VECTORS} At the prompt's positions only.")
    decode_steering_vectors: Any = Field(default=None, description=f"{_VECTORS} At generated positions only.")
    steering_clamps: Any = Field(default=None, description=_CLAMPS)
    prefill_steering_clamps: Any = Field(default=None, description=f"{_CLAMPS} At the prompt's positions only.")
    decode_steering_clamps: Any = Field(default=None, description=f"{_CLAMPS} At generated positions only.")
    steering_features: Any = Field(default=None, description=_FEATURES)
    prefill_steering_features: Any = Field(default=None, description=f"{_FEATURES} At the prompt's positions only.")
    decode_steering_features: Any = Field(default=None, description=f"{_FEATURES} At generated positions only.")
    steering_patches: Any = Field(default=None, description="Rows that replace the stream at given positions.")
    steering_gates: Any = Field(default=None, description="Probes, by name, that decide where gated parts act.")
    steering_name: Any = Field(default=None, description="A registered module, several, or a scale for each.")
    steering_scale: Any = Field(default=None, description="The factor of the modules' vectors and strengths.")
    steering_module_ref: Any = Field(default=None, description="A registered module and its scale, `[name, scale]`.")
    steering_report: Any = Field(default=None, description="Whether the response reports its steering.")
    _options: Iterator[PackedOptions] | None = PrivateAttr(default=None)

    @property
    def options(self) -> Iterator[PackedOptions] | None:
        """The options of each prompt, in order, as they were parsed."""
        return self._options

    @options.setter
    def options(self, options: Iterator[PackedOptions] | None) -> None:
        self._options = options

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's parameters for the next prompt, with its options."""
        params = super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]
        if self._options is not None:
            params.extra_args = {**(params.extra_args or {}), KEY: next(self._options)}
        return params


assert set(Fields.model_fields) == set(FIELDS)


class CapflowCompletionRequest(Fields, CompletionRequest):  # type: ignore[misc]
    """The body of `/v1/completions`."""


class CapflowChatCompletionRequest(Fields, ChatCompletionRequest):  # type: ignore[misc]
    """The body of `/v1/chat/completions`."""


class CapflowResponsesRequest(Fields, ResponsesRequest):  # type: ignore[misc]
    """The body of `/v1/responses`."""


class CapflowBatchChatCompletionRequest(Fields, BatchChatCompletionRequest):  # type: ignore[misc]
    """The body of `/v1/chat/completions/batch`."""


class CapflowMessagesRequest(Fields, AnthropicMessagesRequest):  # type: ignore[misc]
    """The body of `/v1/messages`."""

    # So that misspelt fields reach capflow.
    model_config = ConfigDict(extra="allow")
