# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803  # constexpr parameters of kernels are UPPER by convention
"""Triton twins of `combine.py`: the same rule in one kernel per call. Importing this file needs Triton.

Both kernels run one program per token and tile of heads, over [TILE_HEADS, TILE_DIM] with the head size padded to a
power of two. A first pass over the ranks finds the largest LSE, a second weighs by it; the LSEs of a tile are a few
hundred bytes and come from cache the second time. Outputs of weight 0 are masked at the load: they are not even read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

# Elements of a tile: 8 for each of 128 threads, one 16-byte access in a 2-byte dtype.
_TILE_ELEMENTS = 1024

# Where an LSE is stored by head, its strides depend on the number of tokens: specialising on them would compile in the
# middle of serving.
_jit: Callable[[Any], Any] = triton.jit(
    do_not_specialize=[
        *("lses_stride_rank", "lses_stride_piece", "lses_stride_token", "lses_stride_head"),
        *("lse_stride_piece", "lse_stride_token"),
    ]
)


def combine_triton(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`combine_torch` as one kernel; the head dimension of `outs` and `into` is dense.

    Args:
        outs: [N, T, H, D] partial outputs.
        lses: [N, T, H] their LSEs, float32, natural log, any strides.
        sinks: [H] attention sink logits, dense.
        into: [T, H, D] where to write the output, any dtype; overlaps no input. Default: a new tensor.

    Returns:
        out [T, H, D] in the dtype of `outs` (or `into` itself), lse [T, H] float32, counting in the sinks.
    """
    num_ranks, num_tokens, num_heads, head_size = outs.shape
    if into is None:
        into = torch.empty((num_tokens, num_heads, head_size), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=outs.device)
    if num_tokens == 0:
        return into, lse
    tile_heads, tile_dim = _tile_shape(num_heads, head_size)
    _combine_partials_kernel[(num_tokens, triton.cdiv(num_heads, tile_heads))](
        outs,
        lses,
        outs if sinks is None else sinks,
        into,
        lse,
        *outs.stride()[:3],
        *lses.stride(),
        *into.stride()[:2],
        lse.stride(0),
        num_heads,
        head_size,
        NUM_RANKS=num_ranks,
        HAS_SINKS=sinks is not None,
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
    )
    return into, lse


def correct_partial_triton(
    outs: torch.Tensor, lses: torch.Tensor, dcp_rank: int, *, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`correct_partial_torch` as one kernel; the head dimension of `outs` and `into` is dense.

    Args:
        outs: [M, T, H, D] this rank's partial outputs, in M pieces (one for each receiver).
        lses: [N, M, T, H] the LSEs of all ranks, float32, natural log, any strides.
        dcp_rank: which of the N is this one.
        into: [M, T, H, D] where to write the shares, any dtype; overlaps no input. Default: a new tensor.

    Returns:
        shares [M, T, H, D] in the dtype of `outs` (or `into` itself), lse [M, T, H] float32.
    """
    num_pieces, num_tokens, num_heads, head_size = outs.shape
    if into is None:
        into = torch.empty(outs.shape, dtype=outs.dtype, device=outs.device)
    lse = torch.empty((num_pieces, num_tokens, num_heads), dtype=torch.float32, device=outs.device)
    if num_tokens == 0:
        return into, lse
    tile_heads, tile_dim = _tile_shape(num_heads, head_size)
    _correct_partial_kernel[(num_tokens, triton.cdiv(num_heads, tile_heads), num_pieces)](
        outs,
        lses,
        into,
        lse,
        *outs.stride()[:3],
        *lses.stride(),
        *into.stride()[:3],
        *lse.stride()[:2],
        num_heads,
        head_size,
        RANK=dcp_rank,
        NUM_RANKS=lses.shape[0],
        TILE_HEADS=tile_heads,
        TILE_DIM=tile_dim,
    )
    return into, lse


def _tile_shape(num_heads: int, head_size: int) -> tuple[int, int]:
    tile_dim = triton.next_power_of_2(head_size)
    tile_heads = min(triton.next_power_of_2(num_heads), max(_TILE_ELEMENTS // tile_dim, 1))
    return tile_heads, tile_dim


@triton.jit
def _load_lse(ptr, is_head):  # type: ignore[no-untyped-def]  # Triton decides the types at the launch
    """LSE of a tile of heads, -inf where it is not finite: NaN fails both comparisons."""
    lse = tl.load(ptr, mask=is_head, other=float("-inf")).to(tl.float32)
    return tl.where((lse > float("-inf")) & (lse < float("inf")), lse, float("-inf"))


@_jit
def _combine_partials_kernel(  # type: ignore[no-untyped-def]  # Triton decides the types at the launch
    outs_ptr,  # [NUM_RANKS, T, num_heads, head_size]
    lses_ptr,  # [NUM_RANKS, T, num_heads]
    sinks_ptr,  # [num_heads], read only with HAS_SINKS
    out_ptr,  # [T, num_heads, head_size]
    lse_ptr,  # [T, num_heads]
    outs_stride_rank,
    outs_stride_token,
    outs_stride_head,
    lses_stride_rank,
    lses_stride_token,
    lses_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    num_heads,
    head_size,
    NUM_RANKS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dim = tl.arange(0, TILE_DIM)
    is_head = head < num_heads
    is_dim = dim < head_size

    # Stepping pointers from rank to rank keeps the offsets in 64 bits.
    lse_tile_ptr = lses_ptr + token * lses_stride_token + head * lses_stride_head
    peak = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    rank_ptr = lse_tile_ptr
    for _ in tl.static_range(NUM_RANKS):
        peak = tl.maximum(peak, _load_lse(rank_ptr, is_head))
        rank_ptr += lses_stride_rank
    if HAS_SINKS:
        sink = _load_lse(sinks_ptr + head, is_head)
        peak = tl.maximum(peak, sink)
    peak = tl.where(peak == float("-inf"), 0.0, peak)

    denominator = tl.zeros([TILE_HEADS], tl.float32)
    if HAS_SINKS:
        denominator += tl.exp(sink - peak)
    weighted_sum = tl.zeros([TILE_HEADS, TILE_DIM], tl.float32)
    outs_tile_ptr = outs_ptr + token * outs_stride_token + head[:, None] * outs_stride_head + dim[None, :]
    rank_ptr = lse_tile_ptr
    for _ in tl.static_range(NUM_RANKS):
        weight = tl.exp(_load_lse(rank_ptr, is_head) - peak)
        denominator += weight
        has_weight = (weight > 0.0)[:, None] & is_dim[None, :]
        partial = tl.load(outs_tile_ptr, mask=has_weight, other=0.0).to(tl.float32)
        weighted_sum += partial * weight[:, None]
        rank_ptr += lses_stride_rank
        outs_tile_ptr += outs_stride_rank

    combined = weighted_sum / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    tl.store(lse_ptr + token * lse_stride_token + head, tl.log(denominator) + peak, mask=is_head)
    tl.store(
        out_ptr + token * out_stride_token + head[:, None] * out_stride_head + dim[None, :],
        combined.to(out_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_dim[None, :],
    )


@_jit
def _correct_partial_kernel(  # type: ignore[no-untyped-def]  # Triton decides the types at the launch
    partial_ptr,  # [M, T, num_heads, head_size]
    lses_ptr,  # [NUM_RANKS, M, T, num_heads]
    share_ptr,  # [M, T, num_heads, head_size]
    lse_ptr,  # [M, T, num_heads]
    partial_stride_piece,
    partial_stride_token,
    partial_stride_head,
    lses_stride_rank,
    lses_stride_piece,
    lses_stride_token,
    lses_stride_head,
    share_stride_piece,
    share_stride_token,
    share_stride_head,
    lse_stride_piece,
    lse_stride_token,
    num_heads,
    head_size,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    piece = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, TILE_DIM)
    is_head = head < num_heads
    is_dim = dim < head_size

    lse_tile_ptr = lses_ptr + piece * lses_stride_piece + token * lses_stride_token + head * lses_stride_head
    peak = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    rank_ptr = lse_tile_ptr
    for _ in tl.static_range(NUM_RANKS):
        peak = tl.maximum(peak, _load_lse(rank_ptr, is_head))
        rank_ptr += lses_stride_rank
    peak = tl.where(peak == float("-inf"), 0.0, peak)

    denominator = tl.zeros([TILE_HEADS], tl.float32)
    own_weight = tl.zeros([TILE_HEADS], tl.float32)
    rank_ptr = lse_tile_ptr
    for rank in tl.static_range(NUM_RANKS):
        weight = tl.exp(_load_lse(rank_ptr, is_head) - peak)
        denominator += weight
        if rank == RANK:
            own_weight = weight
        rank_ptr += lses_stride_rank

    own_weight /= tl.where(denominator > 0.0, denominator, 1.0)
    has_weight = (own_weight > 0.0)[:, None] & is_dim[None, :]
    partial_start = partial_ptr + piece * partial_stride_piece + token * partial_stride_token
    partial = tl.load(
        partial_start + head[:, None] * partial_stride_head + dim[None, :], mask=has_weight, other=0.0
    ).to(tl.float32)
    share_start = share_ptr + piece * share_stride_piece + token * share_stride_token
    tl.store(
        share_start + head[:, None] * share_stride_head + dim[None, :],
        (partial * own_weight[:, None]).to(share_ptr.dtype.element_ty),
        mask=is_head[:, None] & is_dim[None, :],
    )
    lse_start = lse_ptr + piece * lse_stride_piece + token * lse_stride_token
    tl.store(lse_start + head, tl.log(denominator) + peak, mask=is_head)
