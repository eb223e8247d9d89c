# SPDX-License-Identifier: Apache-2.0
"""The one answer per KV cache group: everything that follows from where its tokens live.

The scheduler side and the worker side both ask a :class:`GroupGeometry`; no other module scales a block, a row or a
length by the DCP size.  Integers only: the adapter that reads vLLM's specs is
:mod:`vllm_dcp_hybrid.core.kv_cache_specs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dcp_hybrid import placement
from vllm_dcp_hybrid.placement import Placement, cdiv


@dataclass(frozen=True, kw_only=True)
class GroupGeometry:
    """Sizes of one KV cache group under DCP.

    Attributes:
        placement: where the group's tokens live.
        block_size: tokens of one rank under one block id (vLLM's ``kv_cache_spec.block_size``).
        dcp_world_size: size of the DCP group, at least 1.
        interleave_size: consecutive tokens that one rank keeps before the next rank's turn.
        recurrent_mode: ``"none"``, ``"align"`` or ``"all"`` (vLLM's ``mamba_cache_mode``) for a group of recurrent
            states, None for attention.
        num_speculative_blocks: states that a recurrent group keeps for draft tokens, beside the running one.
        page_size_bytes: bytes of one block of one layer on one rank; 0 where nobody asked.
        num_layers: layers of the model in this group.
    """

    placement: Placement
    block_size: int
    dcp_world_size: int = 1
    interleave_size: int = 1
    recurrent_mode: str | None = None
    num_speculative_blocks: int = 0
    page_size_bytes: int = 0
    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.recurrent_mode is not None and self.placement is Placement.SHARDED:
            raise ValueError("the state of a recurrent group cannot be sharded: it covers the whole sequence")
        if self.block_size < 1 or self.dcp_world_size < 1 or self.interleave_size < 1:
            raise ValueError("block_size, dcp_world_size and interleave_size are at least 1")
        if self.is_sharded and self.block_size % self.interleave_size:
            raise ValueError(
                f"block_size ({self.block_size}) must be a multiple of interleave_size ({self.interleave_size})"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether the tokens are split over the ranks."""
        return self.placement is Placement.SHARDED

    @property
    def is_recurrent(self) -> bool:
        """Whether the group stores states of whole prefixes instead of single tokens."""
        return self.recurrent_mode is not None

    @property
    def num_shards(self) -> int:
        """Ranks that a token could live on: the DCP size where sharded, else 1."""
        return self.dcp_world_size if self.is_sharded else 1

    @property
    def effective_block_size(self) -> int:
        """Tokens of the sequence under one block id."""
        return self.block_size * self.num_shards

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether single tokens have slots in this group.  Recurrent states do not."""
        return not self.is_recurrent and self.placement is not Placement.NONE

    def shard(self, dcp_rank: int) -> tuple[int, int]:
        """(number of shards, index of this rank's shard): ``(1, 0)`` for what every rank holds."""
        return (self.dcp_world_size, dcp_rank) if self.is_sharded else (1, 0)

    def table_width(self, max_len: int) -> int:
        """Block ids in one request's row of the block table, for sequences of up to ``max_len`` tokens.

        A recurrent row is never scaled by the DCP size.  In mode ``align`` it is indexed by position over the whole
        sequence although few states are resident, in mode ``none`` it holds the running state alone; the blocks for
        draft tokens are added after.

        Source: ``KVCacheSpec.max_num_blocks_per_req`` of vLLM 0.26.0.
        """
        if self.recurrent_mode == "none":
            return 1 + self.num_speculative_blocks
        return cdiv(max_len, self.effective_block_size) + self.num_speculative_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` tokens fills, without those for draft tokens."""
        if self.placement is Placement.NONE:
            return 0
        if self.recurrent_mode == "none":
            return 1
        return cdiv(num_tokens, self.effective_block_size)

    def resident_blocks(self, max_len: int) -> int:
        """Blocks that one request of ``max_len`` tokens holds at most at any time.

        Source: ``MambaSpec.max_memory_usage_bytes`` and ``FullAttentionSpec.max_memory_usage_bytes``, vLLM 0.25.1.
        """
        if self.recurrent_mode == "align":
            return 2 + self.num_speculative_blocks
        return self.num_blocks(max_len) + self.num_speculative_blocks

    def local_len(self, global_len: int, rank: int) -> int:
        """Tokens of a sequence of ``global_len`` tokens that ``rank`` stores."""
        if not self.is_sharded:
            return global_len
        return placement.local_len(global_len, rank, self.dcp_world_size, self.interleave_size)


@dataclass(frozen=True, kw_only=True)
class CacheGeometry:
    """The groups of one engine, and what they agree on."""

    groups: tuple[GroupGeometry, ...]

    @property
    def effective_block_sizes(self) -> tuple[int, ...]:
        """Per group, tokens of the sequence under one block id."""
        return tuple(group.effective_block_size for group in self.groups)

    @property
    def scheduler_block_size(self) -> int:
        """Tokens to which computed lengths are aligned: the least common multiple over the groups."""
        return math.lcm(*self.effective_block_sizes)

    @property
    def hash_block_size(self) -> int:
        """Tokens under one block hash: the largest size that divides every group's effective block."""
        return math.gcd(*self.effective_block_sizes)

    def blocks_per_request(self, max_len: int) -> int:
        """Blocks of the shared pool that one request of ``max_len`` tokens needs."""
        return sum(group.resident_blocks(max_len) for group in self.groups)

    def kv_token_capacity(self, num_pool_blocks: int, max_len: int) -> int:
        """Tokens that fit in a pool of ``num_pool_blocks`` blocks, counted as requests of ``max_len`` tokens.

        Source: ``get_kv_cache_capacity``, vLLM 0.25.1 (concurrency times ``max_len``).
        """
        return int(num_pool_blocks / self.blocks_per_request(max_len) * max_len)

    def bytes_per_token(self) -> float:
        """Bytes of sharded and replicated *attention* KV that one rank stores per token of a long sequence."""
        return sum(
            group.page_size_bytes * group.num_layers / group.effective_block_size
            for group in self.groups
            if not group.is_recurrent
        )

    def state_bytes_per_request(self, max_len: int) -> int:
        """Bytes of recurrent state that one rank holds for one request of ``max_len`` tokens."""
        return sum(
            group.page_size_bytes * group.num_layers * group.resident_blocks(max_len)
            for group in self.groups
            if group.is_recurrent
        )


def common_geometry(groups: Sequence[GroupGeometry]) -> CacheGeometry:
    """The geometry of groups that share one block pool.

    Raises:
        ValueError: if the groups disagree on the DCP size.
    """
    if len({group.dcp_world_size for group in groups}) > 1:
        raise ValueError("KV cache groups of one engine must agree on the DCP size")
    return CacheGeometry(groups=tuple(groups))
