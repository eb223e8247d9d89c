# SPDX-License-Identifier: Apache-2.0
"""Block tables per KV cache group: width, owner rule and slot mapping from the group's geometry (TARGETS W1, W2).

Stock builds one table per group and treats all alike: rows of recurrent groups are N times too short, the interleave
is lost when the tables are built again (which every hybrid does), and each table believes that it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.core import kv_cache_specs, report
from vllm_dcp_hybrid.geometry import GroupGeometry
from vllm_dcp_hybrid.placement import Placement
from vllm_dcp_hybrid.worker import slot_mapping


class SlotMappingMode(Enum):
    """How a KV cache group maps scheduled tokens to slots: vLLM 0.26's name and values, for older releases."""

    TOKEN_TO_KV_SLOT = "token_to_kv_slot"
    NONE = "none"


# Between the runner, which knows the groups, and the tables that it causes to be built, stock passes block sizes only.
_pending: ContextVar[tuple[GroupGeometry, ...] | None] = ContextVar("dcp_hybrid_pending_tables", default=None)
_ATTRIBUTE = "_dcp_hybrid_geometry"


def may_reinitialize_input_batch(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``GPUModelRunner.may_reinitialize_input_batch`` (the CPU runner inherits it).

    Raises:
        RuntimeError: if the runner kept tables that were built before the groups were known.
    """
    vllm_config = instance.vllm_config
    if not activation.is_active(vllm_config):
        return wrapped(*args, **kwargs)
    kv_cache_config = args[0] if args else kwargs["kv_cache_config"]
    geometry = kv_cache_specs.cache_geometry(kv_cache_config, vllm_config)
    tables = tuple(group for group in geometry.groups if group.placement is not Placement.NONE)
    token = _pending.set(tables)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _pending.reset(token)
    stock_tables = instance.input_batch.block_table.block_tables
    if len(tables) == len(stock_tables) == 1 and not hasattr(stock_tables[0], _ATTRIBUTE):
        # A model with one group keeps its first table where the block size is as expected; stock's is wide enough.
        bind_geometry(stock_tables[0], tables[0])
    built = [getattr(table, _ATTRIBUTE, None) for table in stock_tables]
    if built != list(tables):
        raise RuntimeError(f"vllm-dcp-hybrid: block tables were built for {built}, the KV cache has {list(tables)}")
    if instance.parallel_config.rank == 0:
        report.log_groups_once("worker rank 0", kv_cache_config, vllm_config)
    return result


def multi_group_block_table_init(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``MultiGroupBlockTable.__init__``: rows as wide as the geometry says, each table with its own owner rule.

    Also takes ``slot_mapping_modes`` as vLLM 0.26's constructor does.
    """
    modes: Sequence[Any] | None = kwargs.pop("slot_mapping_modes", None)
    geometries = _pending.get()
    if geometries is None:
        wrapped(*args, **kwargs)
    else:
        max_model_len = kwargs["max_model_len"] if "max_model_len" in kwargs else args[1]
        kwargs["max_num_blocks"] = [geometry.table_width(max_model_len) for geometry in geometries]
        interleaves = {geometry.interleave_size for geometry in geometries if geometry.is_sharded}
        kwargs["cp_kv_cache_interleave_size"] = interleaves.pop() if interleaves else 1
        wrapped(*args[:7], **kwargs)
        for table, geometry in zip(instance.block_tables, geometries, strict=True):
            bind_geometry(table, geometry)
    for table, mode in zip(instance.block_tables, modes or (), strict=False):
        if mode.value == SlotMappingMode.NONE.value:
            stop_slot_mapping(table)


def bind_geometry(table: Any, geometry: GroupGeometry) -> None:
    """Make a stock ``BlockTable`` follow ``geometry``: a group that is not sharded is whole on this rank."""
    setattr(table, _ATTRIBUTE, geometry)
    table.dcp_world_size, table.dcp_rank = geometry.shard(table.dcp_rank)
    if not geometry.uses_slot_mapping:
        stop_slot_mapping(table)


def stop_slot_mapping(table: Any) -> None:
    """No token of this group has a slot; every entry is the pad slot, once and for all."""
    table.slot_mapping_mode = SlotMappingMode.NONE
    table.slot_mapping.gpu.fill_(slot_mapping.PAD_SLOT_ID)


def compute_slot_mapping(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``BlockTable.compute_slot_mapping``: nothing for recurrent groups, our owner rule for sharded ones.

    Stock's kernel interleaves over kernel blocks, ours over allocation blocks; they agree where the interleave divides
    the kernel block.  On a CPU stock has no sharded mapping at all.
    """
    if getattr(instance, "slot_mapping_mode", None) is SlotMappingMode.NONE:
        return
    geometry: GroupGeometry | None = getattr(instance, _ATTRIBUTE, None)
    if geometry is None or not geometry.is_sharded:
        wrapped(*args, **kwargs)
        return

    def bound(num_reqs: int, query_start_loc: Any, positions: Any) -> tuple[int, Any, Any]:
        return num_reqs, query_start_loc, positions

    num_reqs, query_start_loc, positions = bound(*args, **kwargs)
    is_on_host = positions.device.type == "cpu"
    compute = slot_mapping.compute_slot_mapping_torch if is_on_host else slot_mapping.compute_slot_mapping_triton
    compute(
        query_start_loc[: num_reqs + 1],
        positions,
        instance.block_table.gpu,
        instance.slot_mapping.gpu,
        block_size=geometry.block_size,
        kernel_block_size=instance.block_size,
        dcp_world_size=instance.dcp_world_size,
        dcp_rank=instance.dcp_rank,
        interleave_size=geometry.interleave_size,
    )
