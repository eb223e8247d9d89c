# SPDX-License-Identifier: Apache-2.0
"""What happens once per worker, before its model is built: ``WorkerBase.__init__`` is the first to have the config.

Attention backends go into vLLM's registry here, and only where the plugin is active, so that a dormant plugin leaves
the registry alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_dcp_hybrid import activation

# vLLM's name of a backend -> our class of that name.
_CPU = {"CPU_ATTN": "vllm_dcp_hybrid.attention.cpu.DCPCPUAttentionBackend"}
_CUDA = {"FLASH_ATTN": "vllm_dcp_hybrid.attention.flash_attn.DCPFlashAttentionBackend"}
_CUDA_KV_FIRST = {"FLASH_ATTN": "vllm_dcp_hybrid.attention.flash_attn_kv_first.KVFirstFlashAttentionBackend"}

# Where the rank check is on: the same, with a record of their plans.
_RECORDED = {
    _CPU["CPU_ATTN"]: "vllm_dcp_hybrid.attention.recorded_cpu.RecordedCPUAttentionBackend",
    _CUDA["FLASH_ATTN"]: "vllm_dcp_hybrid.attention.recorded_flash_attn.RecordedFlashAttentionBackend",
    _CUDA_KV_FIRST["FLASH_ATTN"]: "vllm_dcp_hybrid.attention.recorded_flash_attn.RecordedKVFirstFlashAttentionBackend",
}

_registered: set[str] = set()
_is_active = False


def worker_base_init(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``WorkerBase.__init__``."""
    begin(instance, args[0] if args else kwargs["vllm_config"], {**_CPU, **_CUDA})
    wrapped(*args, **kwargs)


def worker_base_init_kv_first(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """As :func:`worker_base_init`, for releases whose FlashAttention cache has keys and values first."""
    begin(instance, args[0] if args else kwargs["vllm_config"], {**_CPU, **_CUDA_KV_FIRST})
    wrapped(*args, **kwargs)


def worker_base_init_on_cpu(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """As :func:`worker_base_init`, for releases whose own backends serve on GPUs."""
    vllm_config = args[0] if args else kwargs["vllm_config"]
    begin(instance, vllm_config, _CPU if activation.uses_cpu_engine(vllm_config) else {})
    wrapped(*args, **kwargs)


def begin(worker: Any, vllm_config: Any, backends: Mapping[str, str]) -> None:
    """Start a worker of this process, which may have had another one before."""
    global _is_active
    _is_active = activation.is_active(vllm_config)
    if _registered:
        withdraw_attention_backends()
    if not _is_active:
        return
    from vllm_dcp_hybrid.worker import peer_seams

    peer_seams.install(worker, vllm_config)
    limit_s = activation.rank_check_limit_s(vllm_config)
    if limit_s:
        from vllm_dcp_hybrid.worker import rank_check_seams

        backends = {name: _RECORDED[path] for name, path in backends.items()}
        rank_check_seams.install(worker, limit_s)
    register_attention_backends(backends)


def is_active() -> bool:
    """Whether the plugin is active in this worker, for functions that are not told the configuration."""
    return _is_active


def is_registered(name: str) -> bool:
    """Whether our attention backend of this name serves in this process."""
    return name in _registered


def register_attention_backends(backends: Mapping[str, str]) -> None:
    """Put classes of ours under the names by which vLLM selects them; they are imported when first used."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in backends.items():
        register_backend(AttentionBackendEnum[name], path)
        _registered.add(name)


def withdraw_attention_backends() -> None:
    """Give the names back to stock."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    while _registered:
        AttentionBackendEnum[_registered.pop()].clear_override()
