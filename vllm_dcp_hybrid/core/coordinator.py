# SPDX-License-Identifier: Apache-2.0
"""The KV cache coordinator of a hybrid model under DCP (TARGETS E2).

Stock's coordinator, managers, block pool and both prefix lookups (whole and per group) are right for any mix of block
sizes.  What they cannot know is that one block id of a sharded group covers N times as many tokens of the sequence.
So they are given exactly that, as a block size, and a DCP size of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid.core import kv_cache_specs


def get_kv_cache_coordinator(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps vLLM's factory of this name.

    A single group, and DCP 1, are stock's business.  With several groups and DCP, stock either asserts (prefix
    caching on) or scales every group's block size, recurrent ones too (off), so nothing that works is changed.  The
    factory is not told the configuration; where the plugin is dormant, the engine has stopped before it gets here.
    """
    dcp_world_size = kwargs.get("dcp_world_size", 1)
    kv_cache_config = kwargs.get("kv_cache_config")
    if dcp_world_size <= 1 or kv_cache_config is None or len(kv_cache_config.kv_cache_groups) < 2:
        return wrapped(*args, **kwargs)
    scaled = kv_cache_specs.scheduler_kv_cache_config(kv_cache_config, dcp_world_size)
    return wrapped(*args, **{**kwargs, "kv_cache_config": scaled, "dcp_world_size": 1})
