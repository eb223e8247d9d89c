# SPDX-License-Identifier: Apache-2.0
"""Checks on the model's layers, after the model is built and before its weights load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.core import kv_cache_specs
from vllm_dcp_hybrid.errors import BackendWithoutLSE, UnsupportedAttention, UnsupportedSpec
from vllm_dcp_hybrid.placement import Placement


def initialize_model(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps vLLM's ``initialize_model``: the model's layers exist, with random or no weights."""
    model = wrapped(*args, **kwargs)
    vllm_config = args[0] if args else kwargs["vllm_config"]
    if activation.is_active(vllm_config):
        check_layers(vllm_config)
    return model


def initialize_model_on_cpu(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As :func:`initialize_model`, for releases that check their own layers on GPUs."""
    model = wrapped(*args, **kwargs)
    vllm_config = args[0] if args else kwargs["vllm_config"]
    if activation.uses_cpu_engine(vllm_config):
        check_layers(vllm_config)
    return model


def check_layers(vllm_config: Any) -> None:
    """Refuse layers whose KV nobody places, or whose attention would be wrong over a shard.

    Raises:
        UnplacedSpec, UnsupportedSpec, BackendWithoutLSE, UnsupportedAttention: for the first such layer.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase):
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:
            continue
        placement = kv_cache_specs.place(spec, layer=name)
        has_attention = getattr(layer, "impl", None) is not None
        if placement is Placement.SHARDED:
            if not has_attention:
                raise UnsupportedSpec(
                    layer=name, kind="a sharded cache without an attention backend", why="nothing combines the shards"
                )
            check_sharded_attention(name, layer)
        elif placement is Placement.REPLICATED and has_attention:
            raise UnsupportedSpec(
                layer=name,
                kind="attention that is whole on every rank",
                why="this version's attention backends read sharded caches only",
            )


def check_sharded_attention(name: str, layer: Any) -> None:
    """Refuse what an attention layer over sharded KV cannot do.

    Raises:
        BackendWithoutLSE, UnsupportedAttention.
    """
    from vllm.platforms import current_platform

    impl = layer.impl
    if not impl.need_to_return_lse_for_decode:
        alternative = "CPU_ATTN" if current_platform.is_cpu() else "FLASH_ATTN"
        raise BackendWithoutLSE(layer=name, backend=layer.get_attn_backend().get_name(), alternative=alternative)
    if getattr(impl, "sinks", None) is not None:
        raise UnsupportedAttention(
            layer=name, feature="attention sinks", why="every rank would count the sink once in its own softmax"
        )
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedAttention(
            layer=name, feature="ALiBi", why="its bias would be taken from positions within one rank's shard"
        )
    if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
        raise UnsupportedAttention(
            layer=name, feature="another layer's KV cache", why="its own new keys are not at hand to attend to"
        )
