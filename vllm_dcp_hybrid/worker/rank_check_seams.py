# SPDX-License-Identifier: Apache-2.0
"""Where the rank check meets vLLM: a worker's steps, its groups' collectives, and the branches of attention.

Everything is bound when a worker is made, and only where the check is switched on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from vllm_dcp_hybrid.attention import transport
from vllm_dcp_hybrid.attention.recorded_transport import RecordedTransport
from vllm_dcp_hybrid.worker.device_seam import after_init_device
from vllm_dcp_hybrid.worker.rank_check import RankChecker
from vllm_dcp_hybrid.worker.rank_records import describe_collective

logger = logging.getLogger("vllm.dcp_hybrid")

# Collectives of vLLM's communicators that every rank of a group enters with the same shapes.
_COLLECTIVES = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather", "all_to_all")
_GROUPS = ("tp", "dcp", "pcp")
_STEPS = ("execute_model", "sample_tokens")

_checker: RankChecker | None = None


def checker() -> RankChecker:
    """The checker of this process's worker.

    Raises:
        RuntimeError: there is none.
    """
    if _checker is None:
        raise RuntimeError("the rank check was not begun in this process")
    return _checker


def install(worker: Any, limit_s: float) -> None:
    """Bind the check to a vLLM worker that is being made.

    Args:
        worker: gets its own ``init_device`` and steps.
        limit_s: see :class:`RankChecker`.
    """
    after_init_device(worker, lambda: begin(limit_s))
    for name in _STEPS:
        if hasattr(worker, name):
            setattr(worker, name, _whole_step(getattr(worker, name)))


def begin(limit_s: float) -> None:
    """Start to write down what this rank does: from here on, that is the start-up, until the first step."""
    global _checker
    from vllm.distributed import parallel_state

    tp_group = parallel_state.get_tp_group()
    store = torch.distributed.distributed_c10d._get_default_store()
    if _checker is not None:
        _checker.stop()
    is_on_cpu = tp_group.device.type == "cpu"
    _checker = RankChecker(store, tp_group.rank, tp_group.ranks, limit_s, is_lockstep=is_on_cpu)
    if tp_group.is_first_rank:
        logger.info("vllm-dcp-hybrid rank check is on: %d ranks, limit %.0f s", len(tp_group.ranks), limit_s)
    transport.observe(lambda inner: RecordedTransport(inner, checker()))
    for name in _GROUPS:
        group = getattr(parallel_state, f"_{name.upper()}", None)
        if group is not None and group.world_size > 1:
            record_collectives(name, group.device_communicator)


def record_collectives(group_name: str, communicator: Any) -> None:
    """Give a communicator its own methods, which write down the collective first."""
    for name in _COLLECTIVES:
        if hasattr(communicator, name):
            setattr(
                communicator, name, _recorded(f"{name} in the {group_name.upper()} group", getattr(communicator, name))
            )


def _recorded(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # A compiled graph calls the original: nothing can be written down from within.
            return collective(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        with checker().collective(describe_collective(name, [(tensor.shape, tensor.dtype) for tensor in tensors])):
            return collective(*args, **kwargs)

    return recorded


def _whole_step(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        if checker().step == 0:
            checker().end_step()
        with checker().whole_step():
            return method(*args, **kwargs)

    return step
