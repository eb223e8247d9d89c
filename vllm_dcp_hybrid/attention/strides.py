# SPDX-License-Identifier: Apache-2.0
"""Strides that kernels with tensor memory access can read."""

from __future__ import annotations

import torch


def with_packed_singletons(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements; each dimension of size 1 has the stride that it would have in a packed tensor.

    Torch lets such a stride be anything, since nothing ever steps along it.  FlashAttention 3 and 4 describe the
    tensor to the hardware with all its strides, which must then be multiples of 16 bytes: one KV head per rank is
    enough for an illegal instruction.

    Returns:
        a view, or ``tensor`` itself where there is nothing to change.
    """
    strides = list(tensor.stride())
    packed = 1
    for dim in reversed(range(tensor.ndim)):
        if tensor.shape[dim] == 1:
            strides[dim] = packed
        packed = strides[dim] * tensor.shape[dim]
    return tensor if tuple(strides) == tensor.stride() else tensor.as_strided(tensor.shape, strides)
