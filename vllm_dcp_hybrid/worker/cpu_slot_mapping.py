# SPDX-License-Identifier: Apache-2.0
"""Slot mapping of sharded groups on CPUs, for releases whose block tables are right but whose CPU kernel is not.

From 0.26 on stock's tables know their row width, their owner rule and whether they have slots at all; what is missing
is the mapping itself: "Context Parallelism is not supported on CPU".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid.worker import slot_mapping, startup


def compute_slot_mapping_split_blocks(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``BlockTable.compute_slot_mapping`` where a table holds kernel blocks (0.26 - 0.30)."""
    if is_ours(instance):
        fill(instance, instance.block_size * instance.blocks_per_kv_block, *args, **kwargs)
    else:
        wrapped(*args, **kwargs)


def compute_slot_mapping_whole_blocks(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``BlockTable.compute_slot_mapping`` where a table holds allocation blocks (from 0.31 on)."""
    if is_ours(instance):
        fill(instance, instance.block_size, *args, **kwargs)
    else:
        wrapped(*args, **kwargs)


def is_ours(table: Any) -> bool:
    """Whether a stock ``BlockTable`` needs a mapping that stock refuses: a sharded one, in a worker of ours."""
    if not startup.is_registered("CPU_ATTN") or table.device.type != "cpu":
        return False
    return bool(table.dcp_world_size > 1 and table.slot_mapping_mode.value == "token_to_kv_slot")


def fill(table: Any, block_size: int, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
    """Write the slots of the step's tokens.

    Args:
        table: a stock ``BlockTable``, whose ids are of blocks of ``table.block_size`` tokens.
        block_size: tokens of an allocation block, over which the interleave runs.
        num_reqs, query_start_loc, positions: as ``BlockTable.compute_slot_mapping`` takes them.
    """
    slot_mapping.compute_slot_mapping_torch(
        query_start_loc[: num_reqs + 1],
        positions,
        table.block_table.gpu,
        table.slot_mapping.gpu,
        block_size=block_size,
        kernel_block_size=table.block_size,
        dcp_world_size=table.dcp_world_size,
        dcp_rank=table.dcp_rank,
        interleave_size=table.cp_kv_cache_interleave_size,
    )
