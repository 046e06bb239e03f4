"""Engines in a child process, for what a process can choose only once: the model runner, and Triton's interpreter.

The child is this module run as a script: it reads a `Run` as JSON, and writes the answers of `capflow.LLM`.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import capflow
from tests.kit.engines import GREEDY, engine, prompts, scheduled_ahead, vector
from tests.kit.rows import ALL, check_rows
from tests.kit.sources import ROOT
from tests.kit.watching import watch


@dataclasses.dataclass
class Run:
    """One engine and its requests, which start together.

    requests: dictionaries with `id`, `prompt`, `capture` and `max_tokens`.
    steering: `{layer: seed of a vector}`, by request id.
    ahead: how many steps are scheduled before the output of one is processed; above 0, async scheduling is on.
    """

    model: str
    root: str
    requests: list
    steering: dict = dataclasses.field(default_factory=dict)
    engine: dict = dataclasses.field(default_factory=dict)
    v2: bool = False
    ahead: int = 0


@dataclasses.dataclass
class Answer:
    """The answer to a request."""

    id: str
    prompt: list
    tokens: list
    status: str


def run(job, timeout=300):
    """Return the answers of a child that ran a `Run`, and its report: counts, and its model runner and scheduler."""
    environment = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if job.v2 else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if job.v2:
        environment["TRITON_INTERPRET"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "tests" / "kit" / "triton_cpu"), environment["PYTHONPATH"]]
        )
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(dataclasses.asdict(job)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    return [Answer(**answer) for answer in report["answers"]], report


def requests(lengths, max_tokens):
    """Return a `Run`'s requests, of random prompts of these lengths, that capture everything."""
    return [
        {"id": f"r{n}", "prompt": p["prompt_token_ids"], "capture": ALL, "max_tokens": tokens}
        for n, (p, tokens) in enumerate(zip(prompts(lengths), max_tokens, strict=True))
    ]


def check_answers(answers, root, reference, steering):
    """Hold the files of all that was answered against the reference; steering as a `Run` has it."""
    data = capflow.open(root)
    for answer in answers:
        assert answer.status == "ok"
        check_rows(data[answer.id], [*answer.prompt, *answer.tokens], reference, steering.get(answer.id))


def _child():
    job = Run(**json.load(sys.stdin))
    scheduling = scheduled_ahead(job.ahead) if job.ahead else contextlib.nullcontext(lambda llm: None)
    arguments = {"consumers": [f"filesystem:root={job.root},capture=requests"], "seed": 0, **job.engine}
    with scheduling as deepen, engine(job.model, **arguments) as llm:
        core = llm.llm_engine.engine_core.engine_core
        kinds = {
            "runner": next(
                c.__module__
                for c in type(core.model_executor.driver_worker.worker.model_runner).__mro__
                if c.__module__.startswith("vllm.")
            ),
            "scheduler": type(core.scheduler).__name__,
        }
        deepen(llm)
        counts = watch(llm)
        params = [
            capflow.sampling_params(
                id=request["id"],
                capture=request["capture"],
                steering_vectors={"post_block": {int(n): vector(seed) for n, seed in steering.items()}}
                if (steering := job.steering.get(request["id"]))
                else None,
                **{**GREEDY, "max_tokens": request["max_tokens"], **request.get("sampling", {})},
            )
            for request in job.requests
        ]
        asked = [{"prompt_token_ids": request["prompt"]} for request in job.requests]
        outputs = llm.generate(asked, params, use_tqdm=False)
        answers = [
            Answer(
                request["id"],
                list(output.prompt_token_ids),
                list(output.outputs[0].token_ids),
                {r.status for r in output.capture_results.values()}.pop() if output.capture_results else "none",
            )
            for request, output in zip(job.requests, outputs, strict=True)
        ]
    print(json.dumps({"answers": [dataclasses.asdict(a) for a in answers], "counts": counts, **kinds}))


if __name__ == "__main__":
    _child()
