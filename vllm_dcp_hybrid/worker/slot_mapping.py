# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803  # constexpr parameters of kernels are UPPER by convention
"""Slot mapping: in which KV cache slot of this rank each token of a step is written, if it is written here at all.

Terms, for one KV cache group of `dcp_world_size` ranks (1 where the group is replicated):

    virtual block    `block_size * dcp_world_size` consecutive tokens of the sequence; one allocation block per rank
    round            `interleave_size * dcp_world_size` tokens: one run of `interleave_size` tokens for each rank
    kernel block     what the attention kernel pages by; `block_size // kernel_block_size` make an allocation block

The interleaving runs over allocation blocks, and the kernel block splits only the local offset. So the k-th token that
a rank owns always sits where attention looks for local token k, column `k // kernel_block_size`, also where
`interleave_size` and `kernel_block_size` do not divide each other.

Three twins: `slot_mapping_naive` states the rule, `compute_slot_mapping_torch` runs on any device, and
`compute_slot_mapping_triton` is one kernel launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

PAD_SLOT_ID = -1
"""Slot of a token that another rank owns and of a padded token: cache writers skip it (vLLM has the same constant)."""

HAS_TRITON = find_spec("triton") is not None

_TOKENS_PER_TILE = 256


def slot_mapping_naive(
    query_start_loc: Sequence[int],
    positions: Sequence[int],
    block_table: Sequence[Sequence[int]],
    *,
    block_size: int,
    kernel_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    interleave_size: int,
    num_padded_tokens: int,
) -> list[int]:
    """Slots of a batch's tokens, one token at a time.

    Args:
        query_start_loc: [num_reqs + 1] first token of each request in the batch, then the end; requests may be empty.
        positions: [num_tokens] position of each token in its sequence.
        block_table: [num_reqs][num_blocks] ids of KERNEL blocks.
        block_size: tokens of an allocation block, on one rank.
        kernel_block_size: tokens of a kernel block; divides `block_size`.
        dcp_world_size: ranks over which the group is sharded, 1 where it is replicated.
        dcp_rank: this rank.
        interleave_size: consecutive tokens on one rank; divides `block_size` where `dcp_world_size > 1`.
        num_padded_tokens: length of the result.

    Returns:
        [num_padded_tokens] slots, `PAD_SLOT_ID` where the token is another rank's or belongs to no request.

    Invariant: over the ranks, each position has exactly one slot that is not `PAD_SLOT_ID`, and no slot is used twice.

    Raises:
        ValueError: sizes that do not fit each other.
        IndexError: a token beyond the block table.
    """
    _check_sizes(block_size, kernel_block_size, dcp_world_size, dcp_rank, interleave_size)
    slots = [PAD_SLOT_ID] * num_padded_tokens
    for row, (start, end) in enumerate(pairwise(query_start_loc)):
        for token in range(start, end):
            virtual_block, offset = divmod(positions[token], block_size * dcp_world_size)
            run, offset_in_run = divmod(offset, interleave_size)
            interleave_round, owner = divmod(run, dcp_world_size)
            if owner != dcp_rank:
                continue
            local_pos = virtual_block * block_size + interleave_round * interleave_size + offset_in_run
            column, offset_in_kernel_block = divmod(local_pos, kernel_block_size)
            slots[token] = block_table[row][column] * kernel_block_size + offset_in_kernel_block
    return slots


def compute_slot_mapping_torch(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    kernel_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    interleave_size: int,
) -> None:
    """`slot_mapping_naive` on tensors of any one device, without a device-to-host copy.

    Args:
        query_start_loc: [num_reqs + 1] int32 or int64.
        positions: [num_tokens] int64. Tokens from `query_start_loc[-1]` on belong to no request: any value will do.
        block_table: [max_num_reqs, max_num_blocks] int32, ids of kernel blocks; rows may be a slice of wider ones.
        slot_mapping: [num_padded_tokens >= num_tokens] int64, overwritten to its end.

    The other arguments are those of `slot_mapping_naive`.

    Invariant: equal to `slot_mapping_naive`, slot for slot.

    Raises:
        ValueError: sizes that do not fit each other.
        IndexError: a token beyond the block table (on a CPU; a device-side assertion on CUDA).
    """
    _check_sizes(block_size, kernel_block_size, dcp_world_size, dcp_rank, interleave_size)
    num_reqs, num_tokens = query_start_loc.shape[0] - 1, positions.shape[0]
    slot_mapping[num_tokens:].fill_(PAD_SLOT_ID)
    if num_reqs < 1 or num_tokens == 0:
        slot_mapping.fill_(PAD_SLOT_ID)
        return
    tokens = torch.arange(num_tokens, device=positions.device, dtype=query_start_loc.dtype)
    rows = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    offsets = positions % (block_size * dcp_world_size)
    runs = offsets // interleave_size
    is_written_here = (rows < num_reqs) & (runs % dcp_world_size == dcp_rank)
    local_positions = (
        positions // (block_size * dcp_world_size) * block_size
        + runs // dcp_world_size * interleave_size
        + offsets % interleave_size
    )
    # Where nothing is written, the position may be stale: look up an entry that always exists.
    columns = torch.where(is_written_here, local_positions // kernel_block_size, 0)
    block_ids = block_table[rows.clamp(max=num_reqs - 1), columns].to(torch.int64)
    slots = block_ids * kernel_block_size + local_positions % kernel_block_size
    slot_mapping[:num_tokens] = torch.where(is_written_here, slots, PAD_SLOT_ID)


def compute_slot_mapping_triton(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    block_size: int,
    kernel_block_size: int,
    dcp_world_size: int,
    dcp_rank: int,
    interleave_size: int,
) -> None:
    """`compute_slot_mapping_torch` as one kernel; every tensor is dense in its last dimension.

    The arguments are those of `compute_slot_mapping_torch`. A token beyond the block table is not noticed.

    Invariant: equal to `slot_mapping_naive`, slot for slot.

    Raises:
        ValueError: sizes that do not fit each other.
        ModuleNotFoundError: Triton is not installed.
    """
    _check_sizes(block_size, kernel_block_size, dcp_world_size, dcp_rank, interleave_size)
    if not HAS_TRITON:
        raise ModuleNotFoundError("compute_slot_mapping_triton needs triton: use compute_slot_mapping_torch")
    num_reqs, num_padded_tokens = query_start_loc.shape[0] - 1, slot_mapping.shape[0]
    if num_padded_tokens == 0:
        return
    grid = ((num_padded_tokens + _TOKENS_PER_TILE - 1) // _TOKENS_PER_TILE,)
    _map_token_slots_kernel[grid](
        query_start_loc,
        positions,
        block_table,
        slot_mapping,
        block_table.stride(0),
        max(num_reqs, 0),
        positions.shape[0],
        num_padded_tokens,
        # Halvings until one candidate of num_reqs + 1 is left.
        max(num_reqs, 0).bit_length(),
        KV_BLOCK=block_size,
        KERNEL_BLOCK=kernel_block_size,
        NUM_RANKS=dcp_world_size,
        RANK=dcp_rank,
        INTERLEAVE=interleave_size,
        PAD=PAD_SLOT_ID,
        TILE=_TOKENS_PER_TILE,
    )


def _check_sizes(
    block_size: int, kernel_block_size: int, dcp_world_size: int, dcp_rank: int, interleave_size: int
) -> None:
    if block_size % kernel_block_size:
        raise ValueError(f"kernel block size {kernel_block_size} does not divide block size {block_size}")
    if not 0 <= dcp_rank < dcp_world_size:
        raise ValueError(f"DCP rank {dcp_rank} is outside a group of {dcp_world_size}")
    if dcp_world_size > 1 and block_size % interleave_size:
        raise ValueError(f"interleave size {interleave_size} does not divide block size {block_size}")


if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl

    # Counts change from step to step: specialising on them would compile in the middle of serving.
    _jit: Callable[[Any], Any] = triton.jit(
        do_not_specialize=["num_reqs", "num_tokens", "num_padded_tokens", "num_halvings"]
    )

    @_jit
    def _map_token_slots_kernel(  # type: ignore[no-untyped-def]  # Triton decides the types at the launch
        query_start_loc_ptr,  # [num_reqs + 1]
        positions_ptr,  # [num_tokens]
        block_table_ptr,  # [max_num_reqs, max_num_blocks]
        slot_mapping_ptr,  # [num_padded_tokens]
        block_table_stride,
        num_reqs,
        num_tokens,
        num_padded_tokens,
        num_halvings,
        KV_BLOCK: tl.constexpr,
        KERNEL_BLOCK: tl.constexpr,
        NUM_RANKS: tl.constexpr,
        RANK: tl.constexpr,
        INTERLEAVE: tl.constexpr,
        PAD: tl.constexpr,
        TILE: tl.constexpr,
    ):
        """One program per TILE tokens of the padded batch; each token looks for its request by bisection."""
        token = tl.program_id(0) * TILE + tl.arange(0, TILE)

        # The row is the number of requests that end at or before the token.
        row = tl.zeros([TILE], tl.int32)
        row_limit = tl.zeros([TILE], tl.int32) + num_reqs
        for _ in range(num_halvings):
            is_open = row < row_limit
            middle = (row + row_limit) // 2
            end = tl.load(query_start_loc_ptr + middle + 1, mask=is_open, other=0)
            is_behind = is_open & (end <= token)
            row = tl.where(is_behind, middle + 1, row)
            row_limit = tl.where(is_behind, row_limit, middle)

        has_request = (row < num_reqs) & (token < num_tokens)
        global_pos = tl.load(positions_ptr + token, mask=has_request, other=0).to(tl.int64)
        virtual_block = global_pos // (KV_BLOCK * NUM_RANKS)
        offset = global_pos - virtual_block * (KV_BLOCK * NUM_RANKS)
        run = offset // INTERLEAVE
        interleave_round = run // NUM_RANKS
        is_written_here = has_request & (run - interleave_round * NUM_RANKS == RANK)
        # Within the virtual block, a round counts INTERLEAVE tokens here and the runs before this one are others'.
        local_pos = virtual_block * KV_BLOCK + offset - (run - interleave_round) * INTERLEAVE
        column = local_pos // KERNEL_BLOCK
        entry_ptr = block_table_ptr + row.to(tl.int64) * block_table_stride + column
        block_id = tl.load(entry_ptr, mask=is_written_here, other=0).to(tl.int64)
        slot = block_id * KERNEL_BLOCK + (local_pos - column * KERNEL_BLOCK)
        tl.store(slot_mapping_ptr + token, tl.where(is_written_here, slot, PAD), mask=token < num_padded_tokens)
