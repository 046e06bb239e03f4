"""Who is compared: one line for each contender, with what was predicted before it was measured."""

from __future__ import annotations

from typing import NamedTuple

TASKS = {
    "serve": "Serving, nothing asked for",
    "rows": "Every row: the residual stream after each layer, at each position",
    "steer": "Steering: a vector of its own for each request, at one layer and every position",
    "probe": "Probing: a score of every token at one layer",
}


class Contender(NamedTuple):
    """A peer, or capflow in one mode.

    name: what `--only` takes.
    title: what tables print.
    task: which table it is in.
    program: its file in `programs/`.
    mode: what the program is told to do.
    environment: its file in `requirements/`; empty for the environment of capflow itself.
    predicted: tokens a second, as a share of plain vLLM's, by the clock; 0 where it was not expected to run on a CPU.
    """

    name: str
    title: str
    task: str
    program: str
    mode: str
    environment: str
    predicted: float

    @property
    def ours(self) -> bool:
        """Whether it is capflow."""
        return self.program == "with_capflow"


PLAIN = Contender("plain", "plain vLLM", "serve", "with_vllm", "plain", "", 1.0)
CONTENDERS = {
    contender.name: contender
    for contender in (
        PLAIN,
        Contender("idle", "**capflow**, idle", "serve", "with_capflow", "idle", "", 0.99),
        Contender("disk", "**capflow**, to disk", "rows", "with_capflow", "disk", "", 0.93),
        Contender("memory", "**capflow**, to memory", "rows", "with_capflow", "memory", "", 0.92),
        Contender("vllm-lens", "vllm-lens", "rows", "with_vllm_lens", "rows", "vllm-lens", 0.85),
        Contender("extract", "vLLM `extract_hidden_states`", "rows", "with_extract", "rows", "", 0.9),
        Contender("hooks", "Transformers with hooks", "rows", "with_hooks", "rows", "", 0.7),
        Contender(
            "transformer-lens", "TransformerLens", "rows", "with_transformer_lens", "rows", "transformer-lens", 0.4
        ),
        Contender("nnsight", "nnsight with vLLM", "rows", "with_nnsight", "rows", "nnsight", 0.0),
        Contender("vllm-hook", "vLLM-Hook", "rows", "with_vllm_hook", "rows", "vllm-hook", 0.0),
        Contender("steer", "**capflow**", "steer", "with_capflow", "steer", "", 0.98),
        Contender("vllm-lens-steer", "vllm-lens", "steer", "with_vllm_lens", "steer", "vllm-lens", 0.9),
        Contender("hooks-steer", "Transformers with hooks", "steer", "with_hooks", "steer", "", 0.75),
        Contender("hotwire", "hotwire-vllm", "steer", "with_hotwire", "steer", "hotwire", 0.0),
        Contender("probe", "**capflow**, to DuckDB", "probe", "with_capflow", "probe", "", 0.95),
        Contender("vllm-lens-probe", "vllm-lens, a hook", "probe", "with_vllm_lens", "probe", "vllm-lens", 0.9),
        Contender("hooks-probe", "Transformers with hooks", "probe", "with_hooks", "probe", "", 0.75),
    )
}

ABSENT = {
    "EasySteer": "a fork of vLLM 0.26.0, without a package of its own (`easysteer` of PyPI is another project). vLLM's "
    "CPU wheel of that version needs PyTorch 2.11.0 built for the CPU, which PyPI lacks; with 2.13.0 its kernels do "
    "not load",
    "RhizoNymph's fork of vLLM": "no package and no CPU wheel; it is built from source, for hours on two cores",
}
"""Peers that no requirements file can install, and why."""


def chosen(names: str) -> list[Contender]:
    """Return the contenders that a list with commas names, plain vLLM first; all of them for an empty one.

    Raises ValueError, in one line, for a name that is not there.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()] or list(CONTENDERS)
    for name in asked:
        if name not in CONTENDERS:
            raise ValueError(f"--only: got {name}, expected some of {', '.join(CONTENDERS)}")
    return [PLAIN, *(CONTENDERS[name] for name in CONTENDERS if name in asked and name != PLAIN.name)]
