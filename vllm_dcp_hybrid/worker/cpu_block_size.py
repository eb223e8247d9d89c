# SPDX-License-Identifier: Apache-2.0
"""Attention and recurrent pages of one size on CPUs, where stock leaves that step out (0.20.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation


def update_block_size_for_backend(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``CpuPlatform.update_block_size_for_backend``, which does nothing there.

    Every platform inherits the step; the CPU's overrides it with an empty one until 0.21.
    """
    wrapped(*args, **kwargs)
    vllm_config = args[0] if args else kwargs["vllm_config"]
    if not activation.is_active(vllm_config) or not vllm_config.model_config.is_hybrid:
        return
    backend = instance._find_non_ssm_backend(vllm_config)
    if backend is not None:
        instance._align_hybrid_block_size(vllm_config, backend)
