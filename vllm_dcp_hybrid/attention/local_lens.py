# SPDX-License-Identifier: Apache-2.0
"""This rank's key counts for the rows of a step, on the device: a torch twin and one Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_dcp_hybrid import placement

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


def local_lens_naive(
    seq_lens: list[int], query_lens: list[int], num_decodes: int, *, n: int, rank: int, interleave_size: int
) -> list[int]:
    """Tokens of this rank's cache that each row attends to through it.

    Args:
        seq_lens: global length of each sequence, its new tokens included.
        query_lens: new tokens of each row.
        num_decodes: leading rows that count their own new token in; the others count their context only.
    """
    return [
        placement.local_len(seq if row < num_decodes else seq - query, rank, n, interleave_size)
        for row, (seq, query) in enumerate(zip(seq_lens, query_lens, strict=True))
    ]


def fill_local_lens_torch(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_decodes: int,
    into: torch.Tensor,
    *,
    n: int,
    rank: int,
    interleave_size: int,
) -> None:
    """As :func:`local_lens_naive`, into a buffer that keeps its address.

    Args:
        seq_lens: ``[num_reqs]`` int32.
        query_start_loc: ``[num_reqs + 1]`` int32.
        into: ``[max_num_reqs]`` int32; entries from ``num_reqs`` on become 0.
    """
    num_reqs = seq_lens.shape[0]
    counted = seq_lens - (query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs])
    counted[:num_decodes] = seq_lens[:num_decodes]
    rounds = counted // (n * interleave_size)
    rest = counted - rounds * (n * interleave_size) - rank * interleave_size
    into[:num_reqs] = rounds * interleave_size + rest.clamp(0, interleave_size)
    into[num_reqs:] = 0


def fill_local_lens_triton(
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_decodes: int,
    into: torch.Tensor,
    *,
    n: int,
    rank: int,
    interleave_size: int,
) -> None:
    """:func:`fill_local_lens_torch` as one kernel, without a device-to-host copy."""
    tile = 256
    _fill_local_lens_kernel[(triton.cdiv(into.shape[0], tile),)](
        seq_lens,
        query_start_loc,
        into,
        seq_lens.shape[0],
        num_decodes,
        into.shape[0],
        NUM_RANKS=n,
        RANK=rank,
        INTERLEAVE=interleave_size,
        TILE=tile,
    )


if HAS_TRITON:
    _jit: Callable[[Any], Any] = triton.jit(do_not_specialize=["num_reqs", "num_decodes", "max_num_reqs"])

    @_jit
    def _fill_local_lens_kernel(  # type: ignore[no-untyped-def]  # Triton decides the types at the launch
        seq_lens_ptr,  # [num_reqs]
        query_start_loc_ptr,  # [num_reqs + 1]
        into_ptr,  # [max_num_reqs]
        num_reqs,
        num_decodes,
        max_num_reqs,
        NUM_RANKS: tl.constexpr,  # noqa: N803  # constexpr parameters are UPPER by convention
        RANK: tl.constexpr,  # noqa: N803
        INTERLEAVE: tl.constexpr,  # noqa: N803
        TILE: tl.constexpr,  # noqa: N803
    ):
        row = tl.program_id(0) * TILE + tl.arange(0, TILE)
        is_live = row < num_reqs
        seq_len = tl.load(seq_lens_ptr + row, mask=is_live, other=0)
        begin = tl.load(query_start_loc_ptr + row, mask=is_live, other=0)
        end = tl.load(query_start_loc_ptr + row + 1, mask=is_live, other=0)
        counted = tl.where(row < num_decodes, seq_len, seq_len - (end - begin))
        rounds = counted // (NUM_RANKS * INTERLEAVE)
        rest = counted - rounds * (NUM_RANKS * INTERLEAVE) - RANK * INTERLEAVE
        own = rounds * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)
        tl.store(into_ptr + row, own, mask=row < max_num_reqs)
