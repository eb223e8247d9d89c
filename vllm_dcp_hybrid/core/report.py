# SPDX-License-Identifier: Apache-2.0
"""What the plugin says about itself: one INFO line per process role."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from vllm_dcp_hybrid import activation, plugin
from vllm_dcp_hybrid.core import kv_cache_specs
from vllm_dcp_hybrid.geometry import CacheGeometry, GroupGeometry

# A child of vLLM's own logger, so that it has vLLM's handler, format and level.
logger = logging.getLogger("vllm.dcp_hybrid")

_MIB = 1024 * 1024


def describe_group(group: GroupGeometry, num_groups: int = 1) -> str:
    """One KV cache group in a few words; ``num_groups`` equal ones are told once."""
    kind = f"recurrent ({group.recurrent_mode})" if group.is_recurrent else "attention"
    times = f"{num_groups} x " if num_groups > 1 else ""
    return (
        f"{times}{kind} {group.placement.value}: block {group.block_size}, "
        f"effective {group.effective_block_size}, {group.num_layers} layers"
    )


def describe_groups(geometry: CacheGeometry) -> str:
    """All groups, equal ones told once."""
    distinct = list(dict.fromkeys(geometry.groups))
    return "; ".join(describe_group(group, geometry.groups.count(group)) for group in distinct)


def log_activation(role: str, vllm_config: Any) -> None:
    """The line of a process that knows the configuration and no KV cache yet."""
    logger.info(
        "%s, %s: Decode Context Parallelism %s, size %d, interleave %d, %s",
        plugin.status().summary(),
        role,
        "for a hybrid model" if vllm_config.model_config.is_hybrid else "on CPUs",
        activation.dcp_world_size(vllm_config),
        activation.interleave_size(vllm_config),
        vllm_config.parallel_config.dcp_comm_backend,
    )


@cache
def _log_groups(role: str, summary: str, groups: str) -> None:
    logger.info("%s, %s: %s", summary, role, groups)


def log_groups_once(role: str, kv_cache_config: Any, vllm_config: Any) -> None:
    """The line of a process that builds block tables: once, since vLLM on GPUs also builds them to measure memory."""
    geometry = kv_cache_specs.cache_geometry(kv_cache_config, vllm_config)
    size, interleave = activation.dcp_world_size(vllm_config), activation.interleave_size(vllm_config)
    _log_groups(
        role, plugin.status().summary(), f"DCP size {size}, interleave {interleave}; {describe_groups(geometry)}"
    )


def log_geometry(role: str, kv_cache_config: Any, vllm_config: Any, sizes: tuple[int, int]) -> None:
    """The line of the process that resolves the block sizes.

    Args:
        sizes: (scheduler block, hash block).
    """
    geometry = kv_cache_specs.cache_geometry(kv_cache_config, vllm_config)
    max_len = vllm_config.model_config.max_model_len
    logger.info(
        "%s, %s: DCP size %d, interleave %d; %s; scheduler block %d, hash block %d; "
        "KV tokens expected: %s (%d blocks, %d per request of %d tokens); "
        "attention KV %.1f bytes per token and rank, recurrent state %.2f MiB per request and rank",
        plugin.status().summary(),
        role,
        activation.dcp_world_size(vllm_config),
        activation.interleave_size(vllm_config),
        describe_groups(geometry),
        *sizes,
        format(geometry.kv_token_capacity(kv_cache_config.num_blocks, max_len), ","),
        kv_cache_config.num_blocks,
        geometry.blocks_per_request(max_len),
        max_len,
        geometry.bytes_per_token(),
        geometry.state_bytes_per_request(max_len) / _MIB,
    )
