# SPDX-License-Identifier: Apache-2.0
"""Scheduler block size and hash unit for groups whose effective block sizes differ (TARGETS E1)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.core import kv_cache_specs, report


def resolve_kv_cache_block_sizes(
    wrapped: Callable[..., tuple[int, int]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Wraps vLLM's function of this name: ``(scheduler_block_size, hash_block_size)`` in tokens.

    Stock's own rules (least common multiple, hash unit, the user's override, its errors) run on specs that have their
    effective block sizes, with the context-parallel sizes that stock refuses set to 1.
    """

    def bound(kv_cache_config: Any, vllm_config: Any) -> tuple[Any, Any]:
        return kv_cache_config, vllm_config

    kv_cache_config, vllm_config = bound(*args, **kwargs)
    if len(kv_cache_config.kv_cache_groups) < 2 or not activation.is_active(vllm_config):
        return wrapped(*args, **kwargs)
    scaled = kv_cache_specs.scheduler_kv_cache_config(kv_cache_config, activation.dcp_world_size(vllm_config))
    # Everything else that the original reads is the engine's own.
    one_rank_config = SimpleNamespace(
        cache_config=vllm_config.cache_config,
        kv_transfer_config=vllm_config.kv_transfer_config,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    sizes = wrapped(scaled, one_rank_config)
    report.log_geometry("engine core", kv_cache_config, vllm_config, sizes)
    return sizes
