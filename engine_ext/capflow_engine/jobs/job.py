"""A model job: a file of prompts for one engine, as the command line asks its child process for it."""

from __future__ import annotations

from typing import Any

import msgspec

from capflow.buffers.policy import POLICY_DEFAULT
from capflow.divergence import ON_DIVERGENCE_DEFAULT
from capflow.steering.request import Steering
from capflow_engine.settings import STEERING_BANK_BYTES


class JobPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompts file.

    id: unique in the file.
    max_tokens: replaces the job's.
    capture: in the form of `capflow.sampling_params`.
    steering: of this prompt, in addition to the steering of all.
    line: its number in the file.
    """

    id: str
    prompt: str
    max_tokens: int | None = None
    capture: Any = None
    steering: Steering | None = None
    line: int = 0


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parent's request, as JSON on the child's standard input.

    engine_id: what the parent knows the engine by.
    model: a path or a name that vLLM takes, or `demo`.
    engine: further arguments of the engine, by vLLM's names.
    sampling: arguments of `SamplingParams`, by vLLM's names.
    steer_sites: patterns of the sites that can be steered; None for all.
    steering: the file of the module that steers every prompt.
    steering_modules: `NAME=PATH` of the modules that prompts may name.
    saes: `NAME=PATH@SITE` of the autoencoders by whose features prompts may be steered.
    policy: this field and those after it are the arguments of `Outbound.of`.
    """

    engine_id: str
    model: str
    prompts: list[JobPrompt]
    hub: str
    sites: list[str]
    max_tokens: int
    engine: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    prompts_file: str = ""
    steer_sites: list[str] | None = None
    steering: str | None = None
    steering_modules: list[str] = []
    saes: list[str] = []
    steering_bank_bytes: int = STEERING_BANK_BYTES
    on_divergence: str = ON_DIVERGENCE_DEFAULT
    key: str | None = None
    policy: str = POLICY_DEFAULT
    spool_dir: str | None = None
    spool_bytes: int | None = None
    spill_fallback: str | None = None
