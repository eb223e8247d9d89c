# SPDX-License-Identifier: Apache-2.0
"""Collectives of attention under DCP that are written down by the rank check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_dcp_hybrid.attention.transport import Transport
from vllm_dcp_hybrid.worker.rank_records import describe_collective

if TYPE_CHECKING:
    from vllm_dcp_hybrid.worker.rank_check import RankChecker


class RecordedTransport:
    """A transport whose every call is written down, with the shapes and dtypes that go in."""

    def __init__(self, inner: Transport, checker: RankChecker) -> None:
        self._inner = inner
        self._checker = checker

    def all_gather(self, into: torch.Tensor, piece: torch.Tensor) -> None:
        with self._checker.collective(_describe("all_gather", [piece])):
            self._inner.all_gather(into, piece)

    def reduce_scatter(self, into: torch.Tensor, pieces: torch.Tensor) -> None:
        with self._checker.collective(_describe("reduce_scatter", [pieces])):
            self._inner.reduce_scatter(into, pieces)

    def swap(self, into: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        with self._checker.collective(_describe("swap", pieces)):
            self._inner.swap(into, pieces)


def _describe(name: str, tensors: Sequence[torch.Tensor]) -> str:
    return describe_collective(f"{name} of the DCP exchange", [(tensor.shape, tensor.dtype) for tensor in tensors])
