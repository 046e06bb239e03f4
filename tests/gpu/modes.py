"""The modes of an engine that are proved on a GPU, and the proof of one."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import capflow
from tests.kit.engines import GREEDY, LAYERS, Reference, answers, engine, prompts, relative_error, save_tiny
from tests.kit.oracle import Live
from tests.kit.oracle_scenarios import draw_scenarios
from tests.kit.rows import ALL, SITES

HALF_BOUND = {"bfloat16": 3.1e-2, "float16": 3.9e-3}
"""The largest relative error of a typical row, 8 roundings of the dtype, as in `make architectures`."""


class Mode(NamedTuple):
    """How an engine runs.

    arguments: of the engine.
    environment: the variables of its process.
    ahead: how many steps are scheduled before the output of one is processed.
    """

    arguments: dict[str, Any]
    environment: dict[str, str]
    ahead: int = 0


# Triton multiplies float32 in TF32 otherwise, which is off by 1e-3.
_EXACT = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
_V2 = {**_EXACT, "VLLM_USE_V2_MODEL_RUNNER": "1"}
_SYNC = {"async_scheduling": False}
_GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48]}}
_HALF = {**_GRAPHS, "block_size": 32}
_SEED = 20261126
# All modes fit one GPU side by side.
_SHARE = {"gpu_memory_utilization": 0.05}

MODES = {
    "eager": Mode(_SYNC, _EXACT),
    "graphs": Mode({**_SYNC, **_GRAPHS}, _EXACT),
    "graphs, async": Mode(_GRAPHS, _EXACT, ahead=1),
    "graphs, V2 runner": Mode({**_SYNC, **_GRAPHS}, _V2),
    "bfloat16": Mode({**_HALF, "dtype": "bfloat16"}, {}),
    "float16": Mode({**_HALF, "dtype": "float16"}, {}),
}
"""Two modes of 16 bits run as users run them: with vLLM's own choice of kernels, runner and scheduling."""


def run(mode, requests):
    """Prove one mode in this process; return the numbers of requests and rows, and what was seen, for the table."""
    with tempfile.TemporaryDirectory(prefix="capflow-gpu-") as name:
        directory = Path(name)
        model = save_tiny(directory / "model")
        chosen = MODES[mode]
        if "dtype" in chosen.arguments:
            return _half(model, directory, chosen.arguments)
        return _oracle(model, directory, chosen, requests)


def _oracle(model, directory, mode, requests):
    live = Live(model, directory, ahead=mode.ahead, **_SHARE, **mode.arguments)

    def prove(scenario):
        if live.proved < requests:
            live.prove(llm, scenario)

    with live.start() as llm:
        draw_scenarios(prove, requests, _SEED)
    live.prove_scores()
    seen = ", ".join(f"{count} {kind}" for kind, count in live.seen.items())
    return {"requests": live.proved, "rows": live.rows, "what": f"{seen}; {_device()}"}


def _half(model, directory, arguments):
    """Capture every position of a batch and compare with float32."""
    dtype = arguments["dtype"]
    reference, root = Reference(model), directory / "rows"
    lengths = (5, 33, 64, 97, 150, 7, 21, 120)
    with engine(model, consumers=[f"filesystem:root={root},capture=requests"], **_SHARE, **arguments) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture=ALL, max_tokens=40, **GREEDY) for n in range(len(lengths))
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
    data, rows, worst = capflow.open(root), 0, 0.0
    for number, (output, answer) in enumerate(zip(outputs, answers(outputs), strict=True)):
        tokens = [*output.prompt_token_ids, *answer]
        stream, capture = reference.post_block(tokens), data[f"r{number}"]
        capture.verify()
        assert sorted(capture.sites) == SITES
        for site in SITES:
            got, positions, _ = capture[site]
            assert positions.tolist() == list(range(len(tokens) - 1))
            errors = [relative_error(row, right) for row, right in zip(got, stream[site.layer], strict=False)]
            worst = max(worst, sorted(errors)[len(errors) // 2])
            rows += len(positions)
    assert worst < HALF_BOUND[dtype], worst
    return {
        "requests": len(lengths),
        "rows": rows,
        "what": f"median error {worst:.1e} at the worst of {LAYERS} sites; {_device()}",
    }


def _device():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
