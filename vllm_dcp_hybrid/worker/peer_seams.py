# SPDX-License-Identifier: Apache-2.0
"""Where the comparison of ranks meets vLLM: after a worker's ``init_device``, before its model is built."""

from __future__ import annotations

import logging
import socket
from typing import Any

import torch

from vllm_dcp_hybrid import activation, plugin
from vllm_dcp_hybrid.worker.device_seam import after_init_device
from vllm_dcp_hybrid.worker.peers import Peer, meet

logger = logging.getLogger("vllm.dcp_hybrid")

LIMIT_S = 60.0
"""Ranks leave the last collective of ``init_device`` together; what follows it takes seconds."""


def install(worker: Any, vllm_config: Any) -> None:
    """Let a worker that is being made meet its peers once the distributed store exists."""
    after_init_device(worker, lambda: meet_peers(vllm_config))


def meet_peers(vllm_config: Any) -> None:
    """Compare this rank with all others of the engine.

    Raises:
        PeerSilent, PeersDiffer: see :func:`~vllm_dcp_hybrid.worker.peers.meet`.
    """
    distributed = torch.distributed
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    num_nodes = int(vllm_config.parallel_config.nnodes)
    store = distributed.distributed_c10d._get_default_store()
    per_node = num_ranks // num_nodes if num_nodes > 1 else 0
    meet(store, rank, range(num_ranks), describe(vllm_config), limit_s=LIMIT_S, num_ranks_per_node=per_node)
    if rank == 0 and num_nodes > 1:
        logger.info("%s: the same on all %d ranks of %d nodes", plugin.status().summary(), num_ranks, num_nodes)


def describe(vllm_config: Any) -> Peer:
    """What this rank runs, and the flags that each node is given on its own command line."""
    settings = {
        "-dcp": activation.dcp_world_size(vllm_config),
        "--cp-kv-cache-interleave-size": activation.interleave_size(vllm_config),
        "--dcp-comm-backend": vllm_config.parallel_config.dcp_comm_backend,
        activation.CHECK_RANKS: f"{activation.rank_check_limit_s(vllm_config):g}",
    }
    return Peer(
        host=socket.gethostname(),
        software=plugin.status().summary(),
        settings={name: str(value) for name, value in settings.items()},
    )
