# SPDX-License-Identifier: Apache-2.0
"""Cores for ranks on a machine with fewer NUMA nodes than ranks.

Stock binds rank ``r`` to NUMA node ``r`` and stops where there are fewer nodes than ranks, until the user sets
``VLLM_CPU_OMP_THREADS_BIND``.  Here the cores are divided among the ranks, or shared where there are fewer cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm_dcp_hybrid import activation

_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def omp_process_manager_init(
    wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wraps ``OMPProcessManager.__init__``: stock is given a list of cores where its own ``auto`` would fail."""
    vllm_config = args[0] if args else kwargs["config"]
    binding = binding_for(vllm_config)
    if binding is None:
        wrapped(*args, **kwargs)
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = binding
    try:
        wrapped(*args, **kwargs)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def binding_for(vllm_config: Any) -> str | None:
    """The list of cores per rank that stock should use, or None where stock's own way is right."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not activation.is_active(vllm_config):
        return None
    if os.environ.get(_VARIABLE, "auto") != "auto" or os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0":
        return None
    from vllm.utils import cpu_resource_utils

    parallel_config = vllm_config.parallel_config
    num_ranks = parallel_config.local_world_size
    if len(cpu_resource_utils.get_visible_memory_node()) >= num_ranks:
        return None
    # One logical CPU per physical core, as stock chooses on x86.
    cores = {(cpu.numa_node, cpu.physical_core): cpu.id for cpu in cpu_resource_utils.get_allowed_cpu_list()}
    in_order_of_node = [cores[place] for place in sorted(cores)]
    first = (parallel_config.data_parallel_rank_local or 0) * num_ranks
    # Stock slices the list by data-parallel rank, so it must cover all ranks up to this one's last.
    return "|".join(divide_cores(in_order_of_node, first + num_ranks))


def divide_cores(cores: Sequence[int], num_ranks: int) -> list[str]:
    """Core lists, one per rank: disjoint where there are enough cores, shared in turn where there are not.

    >>> divide_cores([0, 1, 2, 3], 2)
    ['0,1', '2,3']
    >>> divide_cores([0, 1], 4)
    ['0', '1', '0', '1']
    """
    if len(cores) < num_ranks:
        return [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    size = len(cores) // num_ranks
    return [",".join(map(str, cores[rank * size : (rank + 1) * size])) for rank in range(num_ranks)]
