# SPDX-License-Identifier: Apache-2.0
"""The line of worker rank 0 where upstream has hybrid DCP of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation, upstream_path
from vllm_dcp_hybrid.core import report
from vllm_dcp_hybrid.upstream_declarations import UPSTREAM_WORKER


def initialize_from_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``Worker.initialize_from_config``, after which the KV cache, its tables and all layers exist."""
    result = wrapped(*args, **kwargs)
    vllm_config = instance.vllm_config
    if instance.rank == 0 and activation.is_active(vllm_config):
        if activation.is_on_cpu(vllm_config):
            kv_cache_config = args[0] if args else kwargs["kv_cache_config"]
            report.log_groups_once("worker rank 0", kv_cache_config, vllm_config)
        else:
            log_path(vllm_config)
    return result


def log_path(vllm_config: Any) -> None:
    """Say whose block tables and attention are in use on this GPU."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if getattr(layer, "impl", None) is not None]
    exchanged = upstream_path.exchanged_objects(UPSTREAM_WORKER) | upstream_path.exchanged_types(impls)
    overridden = AttentionBackendEnum.FLASH_ATTN
    if overridden.is_overridden():
        exchanged["the registry's FLASH_ATTN"] = overridden.get_path(include_classname=False)
    attention = sorted({type(impl).__name__ for impl in impls})
    upstream_path.log("worker rank 0", ["block tables", *attention], exchanged)
