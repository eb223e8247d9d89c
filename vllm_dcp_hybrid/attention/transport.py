# SPDX-License-Identifier: Apache-2.0
"""Collectives over a DCP group on the current stream: NCCL itself where vLLM has a communicator of its own.

vLLM's `PyNcclCommunicator` enqueues on the current stream; a process group has a stream of its own, with events either
side of each collective, in CUDA graphs too. Where there is no such communicator (CPUs, or PyNCCL switched off) the
process group does the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class DcpGroup(Protocol):
    """What is needed of a group of ranks; vLLM's GroupCoordinator has it."""

    @property
    def world_size(self) -> int: ...
    @property
    def rank_in_group(self) -> int: ...
    @property
    def device_group(self) -> dist.ProcessGroup: ...


class Transport(Protocol):
    """Every rank calls with the same shapes and dtypes, in the same order."""

    def all_gather(self, into: torch.Tensor, piece: torch.Tensor) -> None:
        """`piece` [...] of every rank into `into` [N, ...], both contiguous."""

    def reduce_scatter(self, into: torch.Tensor, pieces: torch.Tensor) -> None:
        """Sum over the ranks of piece `r` of `pieces` [N, ...] into `into` [...] of rank r, both contiguous."""

    def swap(self, into: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        """For each pair: piece `r` of `pieces[i]` [N, ...] to rank r, whose `into[i]` [N, ...] holds it by sender.

        `into[i]` is contiguous, and so is each piece; pieces may overlap one another. Nothing is added up on the way.
        """


class PyNcclTransport:
    """vLLM's communicator: one kernel for each call, `swap` included, however many tensors it swaps."""

    def __init__(self, communicator: Any, world_size: int) -> None:
        self._communicator = communicator
        self._world_size = world_size

    def all_gather(self, into: torch.Tensor, piece: torch.Tensor) -> None:
        self._communicator.all_gather(into, piece)

    def reduce_scatter(self, into: torch.Tensor, pieces: torch.Tensor) -> None:
        self._communicator.reduce_scatter(into, pieces)

    def swap(self, into: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        self._communicator.group_start()
        for received, sent in zip(into, pieces, strict=True):
            for rank in range(self._world_size):
                self._communicator.send(sent[rank], rank)
                self._communicator.recv(received[rank], rank)
        self._communicator.group_end()


class ProcessGroupTransport:
    """`torch.distributed` on any backend; `swap` sends one message of bytes to each rank."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def all_gather(self, into: torch.Tensor, piece: torch.Tensor) -> None:
        # As flat lists: gloo wants equal ranks of dimensions.
        dist.all_gather_into_tensor(into.view(-1), piece.view(-1), group=self._process_group)

    def reduce_scatter(self, into: torch.Tensor, pieces: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(into.view(-1), pieces.view(-1), group=self._process_group)

    def swap(self, into: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        messages = [_as_bytes(sent.contiguous()) for sent in pieces]
        sent_bytes = torch.cat(messages, dim=1)
        received_bytes = torch.empty_like(sent_bytes)
        dist.all_to_all_single(received_bytes, sent_bytes, group=self._process_group)
        parts = torch.split(received_bytes, [message.shape[1] for message in messages], dim=1)
        for received, part in zip(into, parts, strict=True):
            _as_bytes(received).copy_(part)


def fastest_transport(dcp_group: DcpGroup) -> Transport:
    """The fastest way between the ranks of `dcp_group`: the same on every rank, since all ranks are of one kind."""
    communicator = getattr(getattr(dcp_group, "device_communicator", None), "pynccl_comm", None)
    if communicator is not None and not communicator.disabled:
        return PyNcclTransport(communicator, dcp_group.world_size)
    return ProcessGroupTransport(dcp_group.device_group)


_choose: Callable[[DcpGroup], Transport] = fastest_transport


def transport_of(dcp_group: DcpGroup) -> Transport:
    """What the exchange sends through: the fastest way, as it is or observed."""
    return _choose(dcp_group)


def observe(wrap: Callable[[Transport], Transport]) -> None:
    """From here on, what :func:`transport_of` returns is wrapped."""
    global _choose
    _choose = lambda dcp_group: wrap(fastest_transport(dcp_group))  # noqa: E731


def stop_observing() -> None:
    """Undo :func:`observe`."""
    global _choose
    _choose = fastest_transport


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous [N, ...] as a view [N, num_bytes]."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)
