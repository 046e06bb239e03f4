"""The model job: a tapped engine runs a file of prompts, in the child process of `capflow run --model`.

The parent is the hub. The events, in the form of `capflow_engine.jobs.child`, are `preparing` and `notice` at any time
before `ready`, then `model`, `ready`, `done` for each finished request, and `end`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.errors import UsageError, explain
from capflow.saes.sae import Sae
from capflow_engine.compat import engine as compat
from capflow_engine.compat import model as compat_model
from capflow_engine.compat import processor
from capflow_engine.hubs import hubs_at
from capflow_engine.jobs.child import Tell, interrupted_between_steps, work_for_parent
from capflow_engine.jobs.job import JobRequest
from capflow_engine.request.options import KEY, RequestOptions
from capflow_engine.settings import Outbound, Settings, engine_arguments
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.saes import load_for
from capflow_engine.steering.store import SteeringStore

if TYPE_CHECKING:
    from capflow_engine.request.params import Prepared


def run(job: JobRequest, tell: Tell) -> None:
    """Run a job and report its progress."""
    compat.require()
    compat.prepare_environment(job.engine)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    model, options = _prepared(job, tell)
    tell("preparing", stage="inspecting the model")
    from vllm import LLMEngine, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from capflow_engine.jobs.steering import store_for

    try:
        SamplingParams(**job.sampling)
        with compat_model.explaining(model):
            arguments = EngineArgs(model=model, disable_log_stats=True, **options)
    except UsageError:
        raise
    except (TypeError, ValueError) as e:
        raise UsageError(explain("--engine-arg or --sampling", got=str(e), expected="names that vLLM knows")) from e
    user = arguments.additional_config or {}
    if not isinstance(user, dict):
        raise UsageError(explain("--engine-arg additional_config", got=user, expected="a JSON object"))
    tapped = compat_model.check_model(arguments, job.sites, job.steer_sites)
    tell("model", num_layers=tapped.num_layers, sites=tapped.sites)
    if slow := processor.advice(arguments, "--engine-arg dtype=float32"):
        tell("notice", message=slow)
    described = functools.cache(functools.partial(compat_model.info_of, arguments, tapped))
    saes = load_for(job.saes, described, "--sae")
    store = store_for(job, described, saes)
    hubs = hubs_at([job.hub], job.key, insecure=True)
    outbound = Outbound.of(job.policy, job.spool_dir, job.spool_bytes, job.spill_fallback)
    settings = Settings(
        engine=job.engine_id,
        hubs=hubs,
        **tapped.settings,
        outbound=outbound,
        steering_bank_bytes=job.steering_bank_bytes,
        on_divergence=job.on_divergence,
        hub_wait_s=30.0,
        user=user,
    )
    for name, value in engine_arguments(settings).items():
        if name in job.engine and name != "additional_config":
            raise UsageError(explain(f"--engine-arg {name}", expected="to be left out; capflow brings its own"))
        setattr(arguments, name, value)
    compat.run_in_this_process(vars(arguments))
    tell("preparing", stage="loading the model" if arguments.enforce_eager else "loading and compiling the model")
    engine = LLMEngine.from_engine_args(arguments)
    try:
        info = compat.model_info(engine.vllm_config)
        tell("ready", info=msgspec.to_builtins(info))
        _generate(engine, tell, time.perf_counter(), _added(job, engine, info, store, saes))
    except KeyboardInterrupt:
        compat.abort_all(engine)
        raise
    finally:
        # The engine sends the rows that it has. The parent kills this process when it is in a hurry.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        engine.engine_core.shutdown(timeout=limits.ENGINE_END_S_MAX)


def _generate(engine: Any, tell: Tell, begun: float, prepared: Mapping[str, Prepared]) -> None:
    """Run the requests that were added; report each that finishes, and the end of all.

    begun: when the first request was added, on the performance counter.
    """
    from capflow_engine.request.dynamic import taken

    with interrupted_between_steps() as check_interrupted:
        while engine.has_unfinished_requests():
            check_interrupted()
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    applied = prepared[output.request_id].applied_with(taken(output))
                    tell(
                        "done",
                        id=output.request_id,
                        prompt_tokens=len(output.prompt_token_ids or ()),
                        tokens=len(answer.token_ids),
                        text=answer.text,
                        finish_reason=answer.finish_reason,
                        steering_applied=None if applied is None else msgspec.to_builtins(applied),
                        seconds=time.perf_counter() - begun,
                    )
        compat.flush(engine)
    tell("end", seconds=time.perf_counter() - begun)


def _prepared(job: JobRequest, tell: Tell) -> tuple[str, dict[str, Any]]:
    """Return the model of a job and its engine arguments. The demo model is made and gets a dtype here."""
    if job.model != "demo":
        return job.model, job.engine
    from capflow_engine.jobs.demo import prepare

    model = str(prepare(progress=lambda stage: tell("preparing", stage=stage)))
    if "dtype" in job.engine or not processor.emulated_here("bfloat16"):
        return model, job.engine
    tell("notice", message=f"{processor.emulation('bfloat16')}; the demo model runs in float32")
    return model, {**job.engine, "dtype": "float32"}


def _added(
    job: JobRequest, engine: Any, info: ModelInfo, store: SteeringStore, saes: Mapping[str, Sae]
) -> dict[str, Prepared]:
    """Add the prompts to an engine, each with its steering; return them by id.

    Raises UsageError for a prompt that does not fit the model.
    """
    from vllm import SamplingParams

    from capflow_engine.jobs.steering import of_line
    from capflow_engine.request.params import Prepared
    from capflow_engine.request.reach import check_added

    config = engine.vllm_config
    fit = Fit(info, Size.of(job.steering_bank_bytes, info.steered_width, config.scheduler_config.max_num_seqs), saes)
    check_added(engine, config.model_config.max_model_len)
    prepared = {}
    for prompt in job.prompts:
        capture = RequestOptions.make(id=prompt.id, capture=prompt.capture)
        params = SamplingParams(
            **{"temperature": 0.0, **job.sampling, "max_tokens": prompt.max_tokens or job.max_tokens},
            extra_args={KEY: msgspec.structs.replace(capture, steering=prompt.steering).pack()},
        )
        try:
            with of_line(job.prompts_file, prompt.line):
                prepared[prompt.id] = one = Prepared.of(params, fit, store, prompt.id)
                engine.add_request(prompt.id, prompt.prompt, one.params)
        except UsageError:
            raise
        except ValueError as e:
            raise UsageError(explain(f"prompt {prompt.id}", got=str(e), expected="one that fits the model")) from e
    return prepared


def main() -> int:
    """Read a job from standard input and run it; return the exit code."""
    return work_for_parent(lambda tell: run(msgspec.json.decode(sys.stdin.buffer.read(), type=JobRequest), tell))


if __name__ == "__main__":
    sys.exit(main())
