# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on a real device, against their naive twins."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_case_16_combine_ignores_ranks_that_have_nothing(head_size: int, dtype: str, with_sinks: bool) -> None:
    """CASES 16: NaN outputs and LSEs of {-inf, NaN, +inf} never reach the sum."""
    from vllm_dcp_hybrid.attention.combine import combine_naive
    from vllm_dcp_hybrid.attention.combine_triton import combine_triton

    torch.manual_seed(head_size)
    outs = torch.randn(4, 33, 6, head_size, dtype=torch.float32).to(getattr(torch, dtype))
    lses = torch.randn(4, 33, 6) * 4
    for row, nothing in enumerate((float("-inf"), float("nan"), float("inf"))):
        lses[row, row::3] = nothing
        outs[row, row::3] = float("nan")
    lses[:, 5] = float("-inf")
    outs[:, 5] = float("nan")
    sinks = torch.randn(6) if with_sinks else None
    expected, expected_lse = combine_naive(outs, lses, sinks=sinks)
    out, lse = combine_triton(outs.cuda(), lses.cuda(), sinks=None if sinks is None else sinks.cuda())
    tolerance = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}[dtype]
    torch.testing.assert_close(out.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), expected_lse.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 3])
def test_correct_partial_equals_its_torch_twin(rank: int) -> None:
    from vllm_dcp_hybrid.attention.combine import correct_partial_torch
    from vllm_dcp_hybrid.attention.combine_triton import correct_partial_triton

    torch.manual_seed(rank)
    outs = torch.randn(4, 65, 16, 256, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(4, 65, 16, 4, device="cuda").permute(0, 3, 1, 2)
    lses[rank, :, 7] = float("-inf")
    into = torch.empty(4, 65, 16, 256, device="cuda")
    expected, expected_lse = correct_partial_torch(outs, lses, rank, into=torch.empty_like(into))
    actual, actual_lse = correct_partial_triton(outs, lses, rank, into=into)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("block_size", "kernel_block_size", "interleave_size", "n"),
    [(128, 64, 128, 4), (64, 16, 1, 2), (528, 16, 16, 2), (272, 16, 1, 4), (272, 16, 272, 2)],
)
def test_case_04_slot_mapping_equals_the_oracle(
    block_size: int, kernel_block_size: int, interleave_size: int, n: int
) -> None:
    """CASES 4."""
    from vllm_dcp_hybrid.worker.slot_mapping import compute_slot_mapping_triton, slot_mapping_naive

    source = random.Random(block_size)
    rows = [(0, 1000), (4000, 3), (5000, 700)]
    starts = [0, 1000, 1003, 1703]
    positions = [begin + offset for begin, count in rows for offset in range(count)]
    width = -(-6000 // (block_size * n)) * (block_size // kernel_block_size)
    ratio = block_size // kernel_block_size
    table = [
        [block * ratio + part for block in source.sample(range(1, 5000), width // ratio) for part in range(ratio)]
        for _ in rows
    ]
    sizes = {
        "block_size": block_size,
        "kernel_block_size": kernel_block_size,
        "dcp_world_size": n,
        "interleave_size": interleave_size,
    }
    for rank in range(n):
        slots = torch.full((2048,), -7, dtype=torch.int64, device="cuda")
        compute_slot_mapping_triton(
            torch.tensor(starts, dtype=torch.int32, device="cuda"),
            torch.tensor(positions, dtype=torch.int64, device="cuda"),
            torch.tensor(table, dtype=torch.int32, device="cuda"),
            slots,
            dcp_rank=rank,
            **sizes,
        )
        expected = slot_mapping_naive(starts, positions, table, dcp_rank=rank, num_padded_tokens=2048, **sizes)
        assert slots.tolist() == expected
