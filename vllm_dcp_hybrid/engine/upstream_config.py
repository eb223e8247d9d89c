# SPDX-License-Identifier: Apache-2.0
"""The API process where upstream has hybrid DCP of its own: GPUs are its business, CPUs are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.engine import checks
from vllm_dcp_hybrid.engine.config import announce, check_sizes, is_to_act


def create_model_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``EngineArgs.create_model_config``: illegal sizes on CPUs are refused with a legal one."""
    from vllm.platforms import current_platform

    model_config = wrapped(*args, **kwargs)
    if current_platform.is_cpu():
        check_sizes(instance, model_config)
    return model_config


def create_engine_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Wraps ``EngineArgs.create_engine_config``."""
    vllm_config = wrapped(*args, **kwargs)
    if is_to_act(vllm_config):
        check_and_announce_on_cpu(vllm_config)
    return vllm_config


def create_engine_config_without_v2(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As :func:`create_engine_config`, for releases whose V2 runner gives recurrent groups too short rows."""
    vllm_config = wrapped(*args, **kwargs)
    if is_to_act(vllm_config):
        checks.refuse_unsupported(vllm_config, unsupported_with_short_rows(vllm_config))
        check_and_announce_on_cpu(vllm_config)
    return vllm_config


def check_and_announce_on_cpu(vllm_config: Any) -> None:
    """What the CPU engine cannot do; nothing on GPUs.

    Raises:
        UnsupportedFeature, SharedMemoryTooSmall.
    """
    if activation.is_on_cpu(vllm_config):
        checks.refuse_unsupported(vllm_config, unsupported_on_cpu(vllm_config))
        checks.check_shared_memory(vllm_config.parallel_config.world_size)
        announce(vllm_config)


def unsupported_with_short_rows(vllm_config: Any) -> Iterator[checks.Unsupported]:
    """What upstream's own path cannot do before 0.29."""
    yield (
        "The V2 model runner",
        lambda: bool(vllm_config.model_config.is_hybrid and vllm_config.use_v2_model_runner),
        "in this vLLM release it gives recurrent layers block table rows that are too short by the DCP size",
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    )


def unsupported_on_cpu(vllm_config: Any) -> Iterator[checks.Unsupported]:
    """In the order in which they are checked."""
    parallel = vllm_config.parallel_config
    yield (
        "Prefill context parallelism",
        lambda: parallel.prefill_context_parallel_size > 1,
        "no attention engine for CPUs splits the queries of a prompt",
        "drop --prefill-context-parallel-size",
    )
    yield (
        "A KV connector (--kv-transfer-config, --kv-offloading-size)",
        lambda: vllm_config.kv_transfer_config is not None,
        "no connector has been tried with tokens that are split over CPU ranks",
        "drop the connector or use -dcp 1",
    )
    yield (
        "The V2 model runner",
        lambda: bool(vllm_config.use_v2_model_runner),
        "the attention engine that returns the LSE serves the V1 runner",
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    )
    yield checks.speculative_decoding(vllm_config)
    yield checks.routed_experts(vllm_config)
    yield checks.quantised_cache_on_cpu(vllm_config)
