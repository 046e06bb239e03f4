"""Which number formats a CPU emulates, and the advice that a user gets."""

import re

import pytest

from capflow_engine.compat import processor
from capflow_engine.compat.processor import advice, emulates

AVX512 = {"avx512_bf16": False, "avx512_fp16": False, "amx_bf16": False, "amx_fp16": False, "avx512_f": True}
ARM = {"bf16": False, "sve_bf16": False, "fp16_arith": True}


@pytest.mark.parametrize(
    ("dtype", "capabilities", "expected"),
    [
        ("bfloat16", AVX512, True),
        ("float16", AVX512, True),
        ("float32", AVX512, False),
        ("bfloat16", AVX512 | {"avx512_bf16": True}, False),
        ("bfloat16", AVX512 | {"amx_bf16": True}, False),
        ("float16", AVX512 | {"avx512_bf16": True}, True),
        ("bfloat16", ARM, True),
        ("bfloat16", ARM | {"bf16": True}, False),
        ("float16", ARM, False),
        ("bfloat16", {}, False),
        ("bfloat16", {"vsx": True}, False),
    ],
)
def test_a_format_is_emulated_where_no_instruction_computes_it(dtype, capabilities, expected):
    assert emulates(dtype, capabilities) is expected


def test_the_names_are_those_of_torch():
    """Every processor of an architecture reports the same names; a name that torch drops would never be asked again."""
    import torch

    names = torch.cpu.get_capabilities().keys()
    for instructions in processor._INSTRUCTIONS.values():
        assert names & set(instructions)


@pytest.mark.parametrize(
    ("dtype", "capabilities", "expected"),
    [
        ("bfloat16", AVX512, "this processor emulates bfloat16, .* add --dtype float32 to use float32"),
        ("float16", AVX512 | {"amx_bf16": True}, "this processor emulates float16"),
        ("float32", AVX512, "^$"),
        ("bfloat16", AVX512 | {"amx_bf16": True}, "^$"),
    ],
)
def test_the_advice_names_the_format_and_the_option(monkeypatch, tiny, dtype, capabilities, expected):
    import torch
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert re.search(expected, advice(EngineArgs(model=tiny, dtype=dtype), "--dtype float32"))
