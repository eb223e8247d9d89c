# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for a GPU, on a machine that has none: the interpreter accepts code that no GPU does."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

# A process of its own: other tests may have switched Triton to its interpreter.
SCRIPT = """
import importlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile_kernel(module, name, tensors, constants):
    kernel = getattr(importlib.import_module(module), name)
    names = [parameter.name for parameter in kernel.params]
    signature = {}
    for parameter in names:
        if parameter in constants:
            signature[parameter] = "constexpr"
        else:
            signature[parameter] = tensors.get(parameter, "i32")
    unknown = (set(tensors) | set(constants)) - set(names)
    assert not unknown, unknown
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for capability in (80, 90):
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]

compile_kernel(
    "vllm_dcp_hybrid.attention.local_lens",
    "_fill_local_lens_kernel",
    {"seq_lens_ptr": "*i32", "query_start_loc_ptr": "*i32", "into_ptr": "*i32"},
    {"NUM_RANKS": 2, "RANK": 1, "INTERLEAVE": 16, "TILE": 256},
)
compile_kernel(
    "vllm_dcp_hybrid.worker.slot_mapping",
    "_map_token_slots_kernel",
    {"query_start_loc_ptr": "*i32", "positions_ptr": "*i64", "block_table_ptr": "*i32", "slot_mapping_ptr": "*i64"},
    {"KV_BLOCK": 528, "KERNEL_BLOCK": 16, "NUM_RANKS": 2, "RANK": 1, "INTERLEAVE": 16, "PAD": -1, "TILE": 256},
)
compile_kernel(
    "vllm_dcp_hybrid.attention.combine_triton",
    "_combine_partials_kernel",
    {"outs_ptr": "*bf16", "lses_ptr": "*fp32", "sinks_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32"},
    {"NUM_RANKS": 2, "HAS_SINKS": True, "TILE_HEADS": 8, "TILE_DIM": 128},
)
compile_kernel(
    "vllm_dcp_hybrid.attention.combine_triton",
    "_correct_partial_kernel",
    {"partial_ptr": "*bf16", "lses_ptr": "*fp32", "share_ptr": "*fp32", "lse_ptr": "*fp32"},
    {"RANK": 1, "NUM_RANKS": 2, "TILE_HEADS": 8, "TILE_DIM": 128},
)
print("compiled")
"""


def test_kernels_compile_for_ampere_and_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("compiled")


def test_kernel_parameters_carry_no_annotation_but_constexpr() -> None:
    """Triton evaluates annotations when it compiles: `x: Any` is a NameError on a GPU and fine in the interpreter."""
    from vllm_dcp_hybrid.attention import combine_triton, local_lens
    from vllm_dcp_hybrid.worker import slot_mapping

    kernels = {
        name: value
        for module in (combine_triton, local_lens, slot_mapping)
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    }
    assert len(kernels) == 4
    for name, kernel in kernels.items():
        for parameter in inspect.signature(kernel.fn).parameters.values():
            assert parameter.annotation in (inspect.Parameter.empty, "tl.constexpr"), (name, parameter)
