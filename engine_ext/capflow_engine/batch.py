"""The model job: runs a file of prompts through a tapped engine; the child process of `capflow run --model`.

Its parent is the hub, which it tells, as `capflow_engine.child` says, of `preparing`, `loading`, `model` and `ready`, then of
each finished request, `done`, and of the `end`.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import Any

import msgspec

from capflow import limits
from capflow.consumer import POLICY_DEFAULT, Fallback, Policy
from capflow.errors import UsageError, explain
from capflow_engine import compat, compat_model
from capflow_engine.child import Tell, work_for_parent
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import Outbound, Settings, engine_arguments


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a prompts file. id: unique in the file; max_tokens: instead of the job's; capture: as `capflow.sampling_params` takes it."""

    id: str
    prompt: str
    max_tokens: int | None = None
    capture: Any = None


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the parent asks for, as JSON on the child's standard input.

    model: a path or a name that vLLM takes, or `demo`. engine: further arguments of the engine, and sampling of
    `SamplingParams`, by vLLM's names. policy and what follows it: as of `Outbound.of`.
    """

    model: str
    prompts: list[Prompt]
    hub: str
    sites: list[str]
    max_tokens: int
    engine: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    key: str | None = None
    policy: Policy = POLICY_DEFAULT
    spool_dir: str | None = None
    spool_bytes: int | None = None
    spill_fallback: Fallback | None = None


def run(job: Job, tell: Tell) -> None:
    """Run a job and tell of it as it goes."""
    compat.require()
    compat.prepare_environment(job.engine)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    model = job.model
    if model == "demo":
        from capflow_engine.demo import prepare

        model = str(prepare(progress=lambda what: tell("preparing", what=what)))
    tell("loading", model=model)
    from vllm import LLMEngine, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from capflow_engine.options import KEY, RequestOptions

    try:
        SamplingParams(**job.sampling)
        with compat_model.explaining(model):
            arguments = EngineArgs(model=model, disable_log_stats=True, **job.engine)
    except UsageError:
        raise
    except (TypeError, ValueError) as e:
        raise UsageError(explain("--engine-arg or --sampling", got=str(e), expected="names that vLLM knows")) from e
    num_layers, sites, _ = compat_model.check_model(arguments, job.sites)
    tell("model", num_layers=num_layers, sites=sites)
    hubs = hubs_at([job.hub], job.key, insecure=True)  # as the hub was allowed to be
    outbound = Outbound.of(job.policy, job.spool_dir, job.spool_bytes, job.spill_fallback)
    settings = Settings(engine=uuid.uuid4().hex, hubs=hubs, sites=sites, outbound=outbound, hub_wait_s=30.0)
    for name, value in engine_arguments(settings).items():
        if name in job.engine:
            raise UsageError(explain(f"--engine-arg {name}", expected="to be left out; capflow brings its own"))
        setattr(arguments, name, value)
    engine = LLMEngine.from_engine_args(arguments)
    try:
        info = compat.model_info(engine.vllm_config)
        tell("ready", engine=settings.engine, info=msgspec.to_builtins(info))
        begun = time.perf_counter()
        for prompt in job.prompts:
            params = SamplingParams(
                **{"temperature": 0.0, **job.sampling, "max_tokens": prompt.max_tokens or job.max_tokens},
                extra_args={KEY: RequestOptions.make(id=prompt.id, capture=prompt.capture).pack()},
            )
            try:
                engine.add_request(prompt.id, prompt.prompt, params)
            except ValueError as e:
                raise UsageError(explain(f"prompt {prompt.id}", got=str(e), expected="one that fits the model")) from e
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    tell(
                        "done",
                        id=output.request_id,
                        prompt_tokens=len(output.prompt_token_ids or ()),
                        tokens=len(answer.token_ids),
                        text=answer.text,
                        finish_reason=answer.finish_reason,
                        seconds=time.perf_counter() - begun,
                    )
        compat.flush(engine)
        tell("end", seconds=time.perf_counter() - begun)
    finally:
        engine.engine_core.shutdown(timeout=limits.ENGINE_END_S_MAX)


def main() -> int:
    """Read a job from standard input and run it; return the exit code."""
    return work_for_parent(lambda tell: run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), tell))


if __name__ == "__main__":
    sys.exit(main())
