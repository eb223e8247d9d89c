# SPDX-License-Identifier: Apache-2.0
"""What happens once per worker, before its model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation


def worker_base_init(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``WorkerBase.__init__``: the first call of a worker that has the config.

    Attention backends go into vLLM's registry here, and only where the plugin is active, so that a dormant plugin
    leaves the registry alone.
    """
    global _is_active
    vllm_config = args[0] if args else kwargs["vllm_config"]
    _is_active = activation.is_active(vllm_config)
    if _is_active:
        register_attention_backends()
    elif _registered:
        withdraw_attention_backends()
    wrapped(*args, **kwargs)


def worker_base_init_on_cpu(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """As :func:`worker_base_init`, for releases whose own backends serve on GPUs."""
    global _is_active
    vllm_config = args[0] if args else kwargs["vllm_config"]
    _is_active = activation.is_active(vllm_config)
    if activation.uses_cpu_engine(vllm_config):
        register_attention_backends("CPU_ATTN")
    elif _registered:
        withdraw_attention_backends()
    wrapped(*args, **kwargs)


_BACKENDS = {
    "CPU_ATTN": "vllm_dcp_hybrid.attention.cpu.DCPCPUAttentionBackend",
    "FLASH_ATTN": "vllm_dcp_hybrid.attention.flash_attn.DCPFlashAttentionBackend",
}
_registered: set[str] = set()
_is_active = False


def is_active() -> bool:
    """Whether the plugin is active in this worker, for functions that are not told the configuration."""
    return _is_active


def is_registered(name: str) -> bool:
    """Whether our attention backend of this name serves in this process."""
    return name in _registered


def register_attention_backends(*names: str) -> None:
    """Put our attention backends under the names by which vLLM selects them; imported when first used.

    Args:
        names: which; all if none are named.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in names or _BACKENDS:
        register_backend(AttentionBackendEnum[name], _BACKENDS[name])
        _registered.add(name)


def withdraw_attention_backends() -> None:
    """Give the names back, where an earlier worker of this process was active and this one is not."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    while _registered:
        AttentionBackendEnum[_registered.pop()].clear_override()
