# SPDX-License-Identifier: Apache-2.0
"""Copies of recurrent states between blocks on CPUs, where stock has them in Triton only (before 0.25).

In ``align`` mode a state moves from one block to the next at every block boundary, so without this no hybrid has
prefix caching on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid.worker import startup


def batch_memcpy(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps vLLM's function of this name; its pointers are addresses of host memory where they lie in it themselves."""

    def bound(src_ptrs: Any, dst_ptrs: Any, sizes: Any) -> tuple[Any, Any, Any]:
        return src_ptrs, dst_ptrs, sizes

    tables = bound(*args, **kwargs)
    if not startup.is_active() or any(table.device.type != "cpu" for table in tables):
        wrapped(*args, **kwargs)
        return
    for source, destination, num_bytes in zip(*(table.tolist() for table in tables), strict=True):
        ctypes.memmove(destination, source, num_bytes)
