# SPDX-License-Identifier: Apache-2.0
"""What this machine has: cores, NUMA nodes, shared memory, GPUs.  Read from the kernel, without torch."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm_dcp_hybrid.engine import checks

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
# vLLM's CPU communicator maps 4 MiB for each rank (8.2 MiB were measured for two); the rest is room for messages.
_SHM_PER_RANK = checks.SHM_MIB_PER_RANK * MIB
_SHM_FOR_MESSAGES = checks.SHM_MIB_FOR_QUEUES * MIB


@dataclass(frozen=True)
class Machine:
    """The resources that matter to a run.

    Attributes:
        num_cores: logical CPUs that this process may use.
        num_numa_nodes: NUMA nodes, at least 1.
        shm_total: bytes of /dev/shm, 0 where there is none.
        shm_free: bytes of it that are free.
        gpus: model names of the NVIDIA GPUs.
    """

    num_cores: int
    num_numa_nodes: int
    shm_total: int
    shm_free: int
    gpus: tuple[str, ...]

    def shared_memory_problem(self, num_ranks: int) -> str | None:
        """Why /dev/shm is too small for an engine of `num_ranks` ranks; None where it is not."""
        needed = num_ranks * _SHM_PER_RANK + _SHM_FOR_MESSAGES
        if self.shm_free >= needed:
            return None
        return (
            f"/dev/shm has {self.shm_free // MIB} MiB free of {self.shm_total // MIB}, and an engine of {num_ranks} "
            f"ranks needs {needed // MIB}; give the container more (docker run --shm-size=1g), or delete what dead "
            "engines left there (files named *cpushm*)."
        )


def this_machine() -> Machine:
    """The machine and the limits that this process runs under."""
    try:
        shm_total, _, shm_free = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        shm_total = shm_free = 0
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        num_numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        shm_total=shm_total,
        shm_free=shm_free,
        gpus=_gpus(),
    )


def _gpus() -> tuple[str, ...]:
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        names.append(fields.get("Model", "NVIDIA GPU").strip())
    # A container may show the devices only.
    return tuple(names) or tuple(f"GPU {device.name[6:]}" for device in sorted(Path("/dev").glob("nvidia[0-9]*")))
