# SPDX-License-Identifier: Apache-2.0
"""What a configuration must not ask for, checked while it is built: one sentence, before the weights load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm_dcp_hybrid import activation, placement
from vllm_dcp_hybrid.errors import IllegalWorldSize, SharedMemoryTooSmall, UnsupportedFeature

Unsupported = tuple[str, Callable[[], bool], str, str]
"""(feature, is it asked for, why not, remedy)."""

_MIB = 1024 * 1024
_PLAIN_CACHE_DTYPES = frozenset({"auto", "bfloat16", "float16", "float32"})
SHM_MIB_PER_RANK = 4
SHM_MIB_FOR_QUEUES = 32


def check_world_size(model_config: Any, *, tp_size: int, dcp_size: int) -> None:
    """Refuse a DCP size that this model cannot have at this tensor-parallel size.

    Raises:
        IllegalWorldSize: naming the rule that is broken and the largest legal size.
    """
    is_mla = bool(model_config.use_mla)
    num_kv_heads = model_config.get_total_num_kv_heads()
    num_query_heads = model_config.model_arch_config.total_num_attention_heads
    largest = placement.largest_dcp_world_size(tp_size, num_kv_heads, num_query_heads, is_mla=is_mla)
    why = _broken_rule(tp_size, dcp_size, num_kv_heads, num_query_heads, is_mla)
    if why is None:
        return
    if largest > 1:
        remedy = f"The largest legal size here is {largest}: use -dcp {largest}"
    elif is_mla or tp_size > num_kv_heads:
        remedy = "Use -dcp 1"
    else:
        remedy = f"The largest legal size here is 1: use -dcp 1, or -tp {2 * num_kv_heads} or more"
    raise IllegalWorldSize(dcp=dcp_size, tp=tp_size, why=why, remedy=remedy)


def _broken_rule(tp_size: int, dcp_size: int, num_kv_heads: int, num_query_heads: int, is_mla: bool) -> str | None:
    """Why the sizes do not fit, or None where they do."""
    if tp_size % dcp_size:
        return f"{dcp_size} does not divide {tp_size}"
    if is_mla:
        return None
    copies = max(1, tp_size // num_kv_heads)
    if dcp_size > copies:
        return f"each of its {num_kv_heads} KV heads is stored on {copies} rank(s), and tokens can be split no further"
    if copies % dcp_size:
        return f"{dcp_size} does not divide the {copies} ranks that store the same KV head"
    if (num_query_heads // num_kv_heads) % dcp_size:
        return f"the {num_query_heads // num_kv_heads} query heads that share a KV head cannot be divided by {dcp_size}"
    return None


def check_config(vllm_config: Any) -> None:
    """Refuse features that do not go together with hybrid DCP.

    Raises:
        UnsupportedFeature: for the first one found.
        SharedMemoryTooSmall: on a CPU.
    """
    refuse_unsupported(vllm_config, unsupported(vllm_config))
    if activation.is_on_cpu(vllm_config):
        check_shared_memory(vllm_config.parallel_config.world_size)


def refuse_unsupported(vllm_config: Any, features: Iterable[Unsupported]) -> None:
    """Refuse the first feature of the list that is asked for.

    Raises:
        UnsupportedFeature.
    """
    where = "on CPUs" if activation.is_on_cpu(vllm_config) else "for hybrid models"
    for feature, is_asked_for, why, remedy in features:
        if is_asked_for():
            raise UnsupportedFeature(feature=feature, where=where, why=why, remedy=remedy)


def check_shared_memory(num_ranks: int, path: str = "/dev/shm") -> None:
    """Refuse a shared memory file system that is too small for CPU ranks (vllm#34169).

    Measured with vLLM 0.25.1: 4 MiB per rank for the CPU communicator, and the message queues between processes.

    Raises:
        SharedMemoryTooSmall.
    """
    needed = (SHM_MIB_PER_RANK * num_ranks + SHM_MIB_FOR_QUEUES) * _MIB
    if not os.path.isdir(path):
        return  # not this kind of system: whatever stands in for it is not ours to measure
    free = shutil.disk_usage(path).free
    if free < needed:
        raise SharedMemoryTooSmall(free_mib=free // _MIB, needed_mib=needed // _MIB, num_ranks=num_ranks)


def unsupported(vllm_config: Any) -> Iterator[Unsupported]:
    """In the order in which they are checked."""
    parallel = vllm_config.parallel_config
    yield (
        "Prefill context parallelism",
        lambda: parallel.prefill_context_parallel_size > 1,
        "the recurrent layers need the whole prefix of every token",
        "drop --prefill-context-parallel-size",
    )
    yield (
        "A KV connector (--kv-transfer-config, --kv-offloading-size)",
        lambda: vllm_config.kv_transfer_config is not None,
        "connectors multiply every group's block size by the DCP size, those of recurrent states too",
        "drop the connector or use -dcp 1",
    )
    yield (
        "The V2 model runner",
        lambda: bool(getattr(vllm_config, "use_v2_model_runner", False)),
        "in this vLLM release it gives recurrent groups rows that are too short under DCP",
        "unset VLLM_USE_V2_MODEL_RUNNER",
    )
    yield speculative_decoding(vllm_config)
    yield routed_experts(vllm_config)
    yield (
        "Dual-batch overlap",
        lambda: bool(getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False)),
        "two half batches in flight would share one rank's collectives",
        "drop --enable-dbo and --ubatch-size",
    )
    yield quantised_cache_on_cpu(vllm_config)


def speculative_decoding(vllm_config: Any) -> Unsupported:
    """Rows of several tokens that were not all accepted."""
    return (
        "Speculative decoding",
        lambda: vllm_config.speculative_config is not None,
        "draft tokens are not verified over sharded KV by this version yet",
        "drop --speculative-config or use -dcp 1",
    )


def routed_experts(vllm_config: Any) -> Unsupported:
    """What stock keeps beside the KV, by slot; releases that lack the option cannot ask for it."""
    return (
        "Returning routed experts",
        lambda: bool(getattr(vllm_config.model_config, "enable_return_routed_experts", False)),
        "vLLM records them by slot, and each rank has its own slots",
        "drop --enable-return-routed-experts",
    )


def quantised_cache_on_cpu(vllm_config: Any) -> Unsupported:
    """What the CPU engine cannot store."""
    return (
        "A quantised KV cache on a CPU",
        lambda: (
            activation.is_on_cpu(vllm_config) and str(vllm_config.cache_config.cache_dtype) not in _PLAIN_CACHE_DTYPES
        ),
        "the CPU engine that returns the LSE stores keys and values unquantised",
        "use --kv-cache-dtype auto",
    )
