# SPDX-License-Identifier: Apache-2.0
"""The engine core's line where upstream has hybrid DCP of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation, upstream_path
from vllm_dcp_hybrid.core import report
from vllm_dcp_hybrid.upstream_declarations import UPSTREAM_ENGINE_CORE


def scheduler_init(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps ``Scheduler.__init__``, after which the groups, their managers and all block sizes exist."""
    wrapped(*args, **kwargs)
    vllm_config = instance.vllm_config
    if not activation.is_active(vllm_config):
        return
    if activation.is_on_cpu(vllm_config):
        sizes = (instance.block_size, instance.hash_block_size)
        report.log_geometry("engine core", instance.kv_cache_config, vllm_config, sizes)
    else:
        coordinator = instance.kv_cache_manager.coordinator
        exchanged = upstream_path.exchanged_objects(UPSTREAM_ENGINE_CORE)
        exchanged |= upstream_path.exchanged_types([coordinator, *coordinator.single_type_managers])
        upstream_path.log("engine core", ["block sizes", type(coordinator).__name__], exchanged)
