from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "prompt_token_ids", "model", "request_id", "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "truncate_prompt_tokens", "priority", "cache_salt", "capture", "capture_id", "capture_wait", "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering_clamps", "prefill_steering_clamps", "decode_steering_clamps", "steering_patches", "steering_name", "steering_scale", "steering_scales", "steering_report", "steering_gates", "steering_features", "prefill_steering_features", "decode_steering_features")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class SteeringVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class PrefillSteeringVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class DecodeSteeringVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class SteeringClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class PrefillSteeringClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class DecodeSteeringClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class SteeringPatchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookPatches
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookPatches, _Mapping]] = ...) -> None: ...
    class SteeringScalesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SteeringGatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Gate
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Gate, _Mapping]] = ...) -> None: ...
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_WAIT_FIELD_NUMBER: _ClassVar[int]
    STEERING_VECTORS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEERING_VECTORS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEERING_VECTORS_FIELD_NUMBER: _ClassVar[int]
    STEERING_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEERING_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEERING_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    STEERING_PATCHES_FIELD_NUMBER: _ClassVar[int]
    STEERING_NAME_FIELD_NUMBER: _ClassVar[int]
    STEERING_SCALE_FIELD_NUMBER: _ClassVar[int]
    STEERING_SCALES_FIELD_NUMBER: _ClassVar[int]
    STEERING_REPORT_FIELD_NUMBER: _ClassVar[int]
    STEERING_GATES_FIELD_NUMBER: _ClassVar[int]
    STEERING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEERING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEERING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    prompt_token_ids: TokenIds
    model: str
    request_id: str
    max_tokens: int
    min_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str
    capture: _struct_pb2.Struct
    capture_id: str
    capture_wait: bool
    steering_vectors: _containers.MessageMap[str, HookVectors]
    prefill_steering_vectors: _containers.MessageMap[str, HookVectors]
    decode_steering_vectors: _containers.MessageMap[str, HookVectors]
    steering_clamps: _containers.MessageMap[str, HookClamps]
    prefill_steering_clamps: _containers.MessageMap[str, HookClamps]
    decode_steering_clamps: _containers.MessageMap[str, HookClamps]
    steering_patches: _containers.MessageMap[str, HookPatches]
    steering_name: _containers.RepeatedScalarFieldContainer[str]
    steering_scale: float
    steering_scales: _containers.ScalarMap[str, float]
    steering_report: bool
    steering_gates: _containers.MessageMap[str, Gate]
    steering_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    prefill_steering_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    decode_steering_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    def __init__(self, prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., model: _Optional[str] = ..., request_id: _Optional[str] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., capture: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., capture_id: _Optional[str] = ..., capture_wait: _Optional[bool] = ..., steering_vectors: _Optional[_Mapping[str, HookVectors]] = ..., prefill_steering_vectors: _Optional[_Mapping[str, HookVectors]] = ..., decode_steering_vectors: _Optional[_Mapping[str, HookVectors]] = ..., steering_clamps: _Optional[_Mapping[str, HookClamps]] = ..., prefill_steering_clamps: _Optional[_Mapping[str, HookClamps]] = ..., decode_steering_clamps: _Optional[_Mapping[str, HookClamps]] = ..., steering_patches: _Optional[_Mapping[str, HookPatches]] = ..., steering_name: _Optional[_Iterable[str]] = ..., steering_scale: _Optional[float] = ..., steering_scales: _Optional[_Mapping[str, float]] = ..., steering_report: _Optional[bool] = ..., steering_gates: _Optional[_Mapping[str, Gate]] = ..., steering_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., prefill_steering_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., decode_steering_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ...) -> None: ...

class SaeFeatures(_message.Message):
    __slots__ = ("sae", "features", "gate")
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: FeatureValue
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[FeatureValue, _Mapping]] = ...) -> None: ...
    SAE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    sae: str
    features: _containers.MessageMap[int, FeatureValue]
    gate: str
    def __init__(self, sae: _Optional[str] = ..., features: _Optional[_Mapping[int, FeatureValue]] = ..., gate: _Optional[str] = ...) -> None: ...

class FeatureValue(_message.Message):
    __slots__ = ("add", "set", "strength", "gate")
    ADD_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    add: float
    set: float
    strength: float
    gate: str
    def __init__(self, add: _Optional[float] = ..., set: _Optional[float] = ..., strength: _Optional[float] = ..., gate: _Optional[str] = ...) -> None: ...

class Gate(_message.Message):
    __slots__ = ("hook", "layer", "vector", "bias", "threshold", "score", "sharpness", "latch", "positions", "label", "abort")
    HOOK_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SHARPNESS_FIELD_NUMBER: _ClassVar[int]
    LATCH_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hook: str
    layer: int
    vector: _containers.RepeatedScalarFieldContainer[float]
    bias: float
    threshold: float
    score: str
    sharpness: float
    latch: bool
    positions: str
    label: str
    abort: str
    def __init__(self, hook: _Optional[str] = ..., layer: _Optional[int] = ..., vector: _Optional[_Iterable[float]] = ..., bias: _Optional[float] = ..., threshold: _Optional[float] = ..., score: _Optional[str] = ..., sharpness: _Optional[float] = ..., latch: _Optional[bool] = ..., positions: _Optional[str] = ..., label: _Optional[str] = ..., abort: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class HookVectors(_message.Message):
    __slots__ = ("layers", "dtype", "shape", "layer_indices", "data", "scales", "relative", "gate")
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: LayerVectors
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[LayerVectors, _Mapping]] = ...) -> None: ...
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_INDICES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.MessageMap[int, LayerVectors]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    layer_indices: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    scales: _containers.RepeatedScalarFieldContainer[float]
    relative: bool
    gate: str
    def __init__(self, layers: _Optional[_Mapping[int, LayerVectors]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., layer_indices: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., scales: _Optional[_Iterable[float]] = ..., relative: _Optional[bool] = ..., gate: _Optional[str] = ...) -> None: ...

class LayerVectors(_message.Message):
    __slots__ = ("vectors",)
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.RepeatedCompositeFieldContainer[Vector]
    def __init__(self, vectors: _Optional[_Iterable[_Union[Vector, _Mapping]]] = ...) -> None: ...

class Vector(_message.Message):
    __slots__ = ("vector", "scale", "relative", "gate")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    vector: _containers.RepeatedScalarFieldContainer[float]
    scale: float
    relative: bool
    gate: str
    def __init__(self, vector: _Optional[_Iterable[float]] = ..., scale: _Optional[float] = ..., relative: _Optional[bool] = ..., gate: _Optional[str] = ...) -> None: ...

class HookClamps(_message.Message):
    __slots__ = ("layers", "dtype", "shape", "layer_indices", "data", "min", "max", "value", "strength", "gate")
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: LayerClamps
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[LayerClamps, _Mapping]] = ...) -> None: ...
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYER_INDICES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.MessageMap[int, LayerClamps]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    layer_indices: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    min: _containers.RepeatedScalarFieldContainer[float]
    max: _containers.RepeatedScalarFieldContainer[float]
    value: _containers.RepeatedScalarFieldContainer[float]
    strength: _containers.RepeatedScalarFieldContainer[float]
    gate: str
    def __init__(self, layers: _Optional[_Mapping[int, LayerClamps]] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., layer_indices: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., min: _Optional[_Iterable[float]] = ..., max: _Optional[_Iterable[float]] = ..., value: _Optional[_Iterable[float]] = ..., strength: _Optional[_Iterable[float]] = ..., gate: _Optional[str] = ...) -> None: ...

class LayerClamps(_message.Message):
    __slots__ = ("clamps",)
    CLAMPS_FIELD_NUMBER: _ClassVar[int]
    clamps: _containers.RepeatedCompositeFieldContainer[Clamp]
    def __init__(self, clamps: _Optional[_Iterable[_Union[Clamp, _Mapping]]] = ...) -> None: ...

class Clamp(_message.Message):
    __slots__ = ("vector", "min", "max", "value", "strength", "gate", "index", "values")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    vector: _containers.RepeatedScalarFieldContainer[float]
    min: float
    max: float
    value: float
    strength: float
    gate: str
    index: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, vector: _Optional[_Iterable[float]] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., value: _Optional[float] = ..., strength: _Optional[float] = ..., gate: _Optional[str] = ..., index: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class HookPatches(_message.Message):
    __slots__ = ("layers",)
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: LayerPatches
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[LayerPatches, _Mapping]] = ...) -> None: ...
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.MessageMap[int, LayerPatches]
    def __init__(self, layers: _Optional[_Mapping[int, LayerPatches]] = ...) -> None: ...

class LayerPatches(_message.Message):
    __slots__ = ("patches",)
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    patches: _containers.RepeatedCompositeFieldContainer[Patch]
    def __init__(self, patches: _Optional[_Iterable[_Union[Patch, _Mapping]]] = ...) -> None: ...

class Patch(_message.Message):
    __slots__ = ("positions", "vector", "amount", "gate", "index")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    vector: Rows
    amount: float
    gate: str
    index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., vector: _Optional[_Union[Rows, _Mapping]] = ..., amount: _Optional[float] = ..., gate: _Optional[str] = ..., index: _Optional[_Iterable[int]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("id", "model", "prompt_token_ids", "outputs", "usage", "capture_results", "capture_results_by_choice", "steering_applied")
    class CaptureResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CaptureResult
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CaptureResult, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_RESULTS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_RESULTS_BY_CHOICE_FIELD_NUMBER: _ClassVar[int]
    STEERING_APPLIED_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    usage: Usage
    capture_results: _containers.MessageMap[str, CaptureResult]
    capture_results_by_choice: _containers.RepeatedCompositeFieldContainer[CaptureResults]
    steering_applied: SteeringApplied
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., capture_results: _Optional[_Mapping[str, CaptureResult]] = ..., capture_results_by_choice: _Optional[_Iterable[_Union[CaptureResults, _Mapping]]] = ..., steering_applied: _Optional[_Union[SteeringApplied, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    stop_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    class TopEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.ScalarMap[int, float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class CaptureResults(_message.Message):
    __slots__ = ("results",)
    class ResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CaptureResult
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CaptureResult, _Mapping]] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.MessageMap[str, CaptureResult]
    def __init__(self, results: _Optional[_Mapping[str, CaptureResult]] = ...) -> None: ...

class CaptureResult(_message.Message):
    __slots__ = ("status", "error", "payload", "budget_reached", "dropped", "tag", "adapter", "weights")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BUDGET_REACHED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    status: str
    error: str
    payload: _struct_pb2.Struct
    budget_reached: bool
    dropped: _containers.RepeatedCompositeFieldContainer[Dropped]
    tag: str
    adapter: str
    weights: _containers.RepeatedCompositeFieldContainer[Weights]
    def __init__(self, status: _Optional[str] = ..., error: _Optional[str] = ..., payload: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., budget_reached: _Optional[bool] = ..., dropped: _Optional[_Iterable[_Union[Dropped, _Mapping]]] = ..., tag: _Optional[str] = ..., adapter: _Optional[str] = ..., weights: _Optional[_Iterable[_Union[Weights, _Mapping]]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version", "label", "start")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    version: int
    label: str
    start: int
    def __init__(self, version: _Optional[int] = ..., label: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("rows", "reason", "gaps")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    reason: str
    gaps: _containers.RepeatedCompositeFieldContainer[Gap]
    def __init__(self, rows: _Optional[int] = ..., reason: _Optional[str] = ..., gaps: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("sites", "start", "stop")
    SITES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.RepeatedScalarFieldContainer[str]
    start: int
    stop: int
    def __init__(self, sites: _Optional[_Iterable[str]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class SteeringApplied(_message.Message):
    __slots__ = ("key", "prefill", "decode", "patched", "modules", "global_state", "actions", "controllers", "gates")
    class PrefillEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DecodeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PatchedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: SiteCounts
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[SiteCounts, _Mapping]] = ...) -> None: ...
    class ModulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PATCHED_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STATE_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    key: str
    prefill: _containers.ScalarMap[str, int]
    decode: _containers.ScalarMap[str, int]
    patched: _containers.MessageMap[int, SiteCounts]
    modules: _containers.ScalarMap[str, float]
    global_state: bool
    actions: _containers.RepeatedCompositeFieldContainer[SteeringChange]
    controllers: _containers.RepeatedScalarFieldContainer[str]
    gates: _containers.RepeatedCompositeFieldContainer[AppliedGate]
    def __init__(self, key: _Optional[str] = ..., prefill: _Optional[_Mapping[str, int]] = ..., decode: _Optional[_Mapping[str, int]] = ..., patched: _Optional[_Mapping[int, SiteCounts]] = ..., modules: _Optional[_Mapping[str, float]] = ..., global_state: _Optional[bool] = ..., actions: _Optional[_Iterable[_Union[SteeringChange, _Mapping]]] = ..., controllers: _Optional[_Iterable[str]] = ..., gates: _Optional[_Iterable[_Union[AppliedGate, _Mapping]]] = ...) -> None: ...

class AppliedGate(_message.Message):
    __slots__ = ("name", "site", "score", "threshold", "sharpness", "latch", "positions", "label", "abort")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SHARPNESS_FIELD_NUMBER: _ClassVar[int]
    LATCH_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    name: str
    site: str
    score: str
    threshold: float
    sharpness: float
    latch: bool
    positions: str
    label: str
    abort: str
    def __init__(self, name: _Optional[str] = ..., site: _Optional[str] = ..., score: _Optional[str] = ..., threshold: _Optional[float] = ..., sharpness: _Optional[float] = ..., latch: _Optional[bool] = ..., positions: _Optional[str] = ..., label: _Optional[str] = ..., abort: _Optional[str] = ...) -> None: ...

class SteeringChange(_message.Message):
    __slots__ = ("request", "kind", "sites", "position")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request: str
    kind: str
    sites: _containers.RepeatedScalarFieldContainer[str]
    position: int
    def __init__(self, request: _Optional[str] = ..., kind: _Optional[str] = ..., sites: _Optional[_Iterable[str]] = ..., position: _Optional[int] = ...) -> None: ...

class SiteCounts(_message.Message):
    __slots__ = ("sites",)
    class SitesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SITES_FIELD_NUMBER: _ClassVar[int]
    sites: _containers.ScalarMap[str, int]
    def __init__(self, sites: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GetCaptureRequest(_message.Message):
    __slots__ = ("id", "n", "wait", "prompts")
    ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    n: int
    wait: float
    prompts: int
    def __init__(self, id: _Optional[str] = ..., n: _Optional[int] = ..., wait: _Optional[float] = ..., prompts: _Optional[int] = ...) -> None: ...

class CaptureState(_message.Message):
    __slots__ = ("id", "done", "capture_results", "capture_results_by_choice")
    class CaptureResultsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: CaptureResult
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[CaptureResult, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_RESULTS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_RESULTS_BY_CHOICE_FIELD_NUMBER: _ClassVar[int]
    id: str
    done: bool
    capture_results: _containers.MessageMap[str, CaptureResult]
    capture_results_by_choice: _containers.RepeatedCompositeFieldContainer[CaptureResults]
    def __init__(self, id: _Optional[str] = ..., done: _Optional[bool] = ..., capture_results: _Optional[_Mapping[str, CaptureResult]] = ..., capture_results_by_choice: _Optional[_Iterable[_Union[CaptureResults, _Mapping]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("vectors", "prefill_vectors", "decode_vectors", "clamps", "prefill_clamps", "decode_clamps", "replace", "gates", "features", "prefill_features", "decode_features")
    class VectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class PrefillVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class DecodeVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class ClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class PrefillClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class DecodeClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class GatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Gate
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Gate, _Mapping]] = ...) -> None: ...
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_VECTORS_FIELD_NUMBER: _ClassVar[int]
    DECODE_VECTORS_FIELD_NUMBER: _ClassVar[int]
    CLAMPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FEATURES_FIELD_NUMBER: _ClassVar[int]
    DECODE_FEATURES_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.MessageMap[str, HookVectors]
    prefill_vectors: _containers.MessageMap[str, HookVectors]
    decode_vectors: _containers.MessageMap[str, HookVectors]
    clamps: _containers.MessageMap[str, HookClamps]
    prefill_clamps: _containers.MessageMap[str, HookClamps]
    decode_clamps: _containers.MessageMap[str, HookClamps]
    replace: bool
    gates: _containers.MessageMap[str, Gate]
    features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    prefill_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    decode_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    def __init__(self, vectors: _Optional[_Mapping[str, HookVectors]] = ..., prefill_vectors: _Optional[_Mapping[str, HookVectors]] = ..., decode_vectors: _Optional[_Mapping[str, HookVectors]] = ..., clamps: _Optional[_Mapping[str, HookClamps]] = ..., prefill_clamps: _Optional[_Mapping[str, HookClamps]] = ..., decode_clamps: _Optional[_Mapping[str, HookClamps]] = ..., replace: _Optional[bool] = ..., gates: _Optional[_Mapping[str, Gate]] = ..., features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., prefill_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., decode_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ...) -> None: ...

class SetResponse(_message.Message):
    __slots__ = ("key", "hook_points", "layers_updated")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOOK_POINTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_UPDATED_FIELD_NUMBER: _ClassVar[int]
    key: str
    hook_points: _containers.RepeatedScalarFieldContainer[str]
    layers_updated: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[str] = ..., hook_points: _Optional[_Iterable[str]] = ..., layers_updated: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterModuleRequest(_message.Message):
    __slots__ = ("name", "vectors", "prefill_vectors", "decode_vectors", "clamps", "prefill_clamps", "decode_clamps", "gates", "features", "prefill_features", "decode_features")
    class VectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class PrefillVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class DecodeVectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookVectors
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookVectors, _Mapping]] = ...) -> None: ...
    class ClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class PrefillClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class DecodeClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HookClamps
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HookClamps, _Mapping]] = ...) -> None: ...
    class GatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Gate
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Gate, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_VECTORS_FIELD_NUMBER: _ClassVar[int]
    DECODE_VECTORS_FIELD_NUMBER: _ClassVar[int]
    CLAMPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CLAMPS_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FEATURES_FIELD_NUMBER: _ClassVar[int]
    DECODE_FEATURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    vectors: _containers.MessageMap[str, HookVectors]
    prefill_vectors: _containers.MessageMap[str, HookVectors]
    decode_vectors: _containers.MessageMap[str, HookVectors]
    clamps: _containers.MessageMap[str, HookClamps]
    prefill_clamps: _containers.MessageMap[str, HookClamps]
    decode_clamps: _containers.MessageMap[str, HookClamps]
    gates: _containers.MessageMap[str, Gate]
    features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    prefill_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    decode_features: _containers.RepeatedCompositeFieldContainer[SaeFeatures]
    def __init__(self, name: _Optional[str] = ..., vectors: _Optional[_Mapping[str, HookVectors]] = ..., prefill_vectors: _Optional[_Mapping[str, HookVectors]] = ..., decode_vectors: _Optional[_Mapping[str, HookVectors]] = ..., clamps: _Optional[_Mapping[str, HookClamps]] = ..., prefill_clamps: _Optional[_Mapping[str, HookClamps]] = ..., decode_clamps: _Optional[_Mapping[str, HookClamps]] = ..., gates: _Optional[_Mapping[str, Gate]] = ..., features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., prefill_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ..., decode_features: _Optional[_Iterable[_Union[SaeFeatures, _Mapping]]] = ...) -> None: ...

class UnregisterModuleRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ModuleNames(_message.Message):
    __slots__ = ("name", "modules")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    name: str
    modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., modules: _Optional[_Iterable[str]] = ...) -> None: ...

class SteeringState(_message.Message):
    __slots__ = ("active", "key", "global_state", "generation", "modules")
    class ModulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TiersState
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TiersState, _Mapping]] = ...) -> None: ...
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    active: bool
    key: str
    global_state: TiersState
    generation: int
    modules: _containers.MessageMap[str, TiersState]
    def __init__(self, active: _Optional[bool] = ..., key: _Optional[str] = ..., global_state: _Optional[_Union[TiersState, _Mapping]] = ..., generation: _Optional[int] = ..., modules: _Optional[_Mapping[str, TiersState]] = ...) -> None: ...

class ModulesState(_message.Message):
    __slots__ = ("modules",)
    class ModulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TiersState
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TiersState, _Mapping]] = ...) -> None: ...
    MODULES_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.MessageMap[str, TiersState]
    def __init__(self, modules: _Optional[_Mapping[str, TiersState]] = ...) -> None: ...

class TiersState(_message.Message):
    __slots__ = ("base", "prefill", "decode", "gates")
    BASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    base: TierState
    prefill: TierState
    decode: TierState
    gates: _containers.RepeatedCompositeFieldContainer[AppliedGate]
    def __init__(self, base: _Optional[_Union[TierState, _Mapping]] = ..., prefill: _Optional[_Union[TierState, _Mapping]] = ..., decode: _Optional[_Union[TierState, _Mapping]] = ..., gates: _Optional[_Iterable[_Union[AppliedGate, _Mapping]]] = ...) -> None: ...

class TierState(_message.Message):
    __slots__ = ("vectors", "clamps", "features")
    class VectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ClampsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    CLAMPS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.ScalarMap[str, float]
    clamps: _containers.ScalarMap[str, int]
    features: _containers.ScalarMap[str, int]
    def __init__(self, vectors: _Optional[_Mapping[str, float]] = ..., clamps: _Optional[_Mapping[str, int]] = ..., features: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LayersState(_message.Message):
    __slots__ = ("layers", "sites", "num_layers", "hidden_size", "dtype")
    class LayersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: LayerState
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[LayerState, _Mapping]] = ...) -> None: ...
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.MessageMap[int, LayerState]
    sites: _containers.RepeatedScalarFieldContainer[str]
    num_layers: int
    hidden_size: int
    dtype: str
    def __init__(self, layers: _Optional[_Mapping[int, LayerState]] = ..., sites: _Optional[_Iterable[str]] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class LayerState(_message.Message):
    __slots__ = ("hook_points",)
    HOOK_POINTS_FIELD_NUMBER: _ClassVar[int]
    hook_points: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hook_points: _Optional[_Iterable[str]] = ...) -> None: ...
