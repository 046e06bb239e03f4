"""Number formats that the CPU of an engine has no instructions for.

The CPU emulates such a format: it converts every number to float32 and back. A matrix product of 256 rows then takes
seven times as long in bfloat16 as in float32 (AVX-512 without BF16), and forty times as long in float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By format: the capabilities of which one is enough, under the names of `torch.cpu.get_capabilities`.
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def emulates(dtype: str, capabilities: Mapping[str, Any]) -> bool:
    """Return whether a processor emulates a number format; False for a processor that is neither x86-64 nor Arm.

    dtype: `bfloat16`, `float16` or another.
    capabilities: of the processor, from `torch.cpu.get_capabilities`. Only those of its architecture are in it.
    """
    instructions = [capabilities[name] for name in _INSTRUCTIONS.get(dtype, ()) if name in capabilities]
    return bool(instructions) and not any(instructions)


def emulated_here(dtype: str) -> bool:
    """Return whether vLLM runs on a CPU here that emulates a number format."""
    import torch
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu()) and emulates(dtype, torch.cpu.get_capabilities())


def emulation(dtype: str) -> str:
    """Return the beginning of a message about a number format that is emulated here."""
    return f"this processor emulates {dtype}, which is several times slower than float32"


def advice(engine_args: Any, option: str) -> str:
    """Return a warning if the number format of a model is emulated here, else an empty text.

    engine_args: vLLM's.
    option: how a user chooses float32.
    """
    if not any(map(emulated_here, _INSTRUCTIONS)):
        return ""
    dtype = str(engine_args.create_model_config().dtype).removeprefix("torch.")
    return f"{emulation(dtype)}; add {option} to use float32" if emulated_here(dtype) else ""
