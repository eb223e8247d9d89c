# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM 0.26's contract on specs, for older releases.

This module imports nothing of vLLM: it is itself imported while vLLM's module of specs is, to add the name there.
"""

from __future__ import annotations

from typing import Any


def max_num_blocks_per_req(spec: Any, vllm_config: Any, max_len: int) -> int:
    """Block ids in one request's row of the worker's block table: vLLM 0.26's method of this name.

    Args:
        spec: a vLLM ``KVCacheSpec``.
        vllm_config: supplies the DCP size and ``mamba_cache_mode``.
        max_len: longest sequence, tokens.
    """
    from vllm_dcp_hybrid import activation
    from vllm_dcp_hybrid.core import kv_cache_specs

    geometry = kv_cache_specs.group_geometry(
        spec,
        dcp_world_size=activation.dcp_world_size(vllm_config),
        recurrent_mode=vllm_config.cache_config.mamba_cache_mode,
    )
    return geometry.table_width(max_len)
