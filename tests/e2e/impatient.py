# SPDX-License-Identifier: Apache-2.0
"""A worker that waits for the other ranks for seconds instead of a minute."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dcp_hybrid.worker import peer_seams

peer_seams.LIMIT_S = 8.0


class ImpatientWorker(CPUWorker):
    """As stock's; its module is what differs."""
