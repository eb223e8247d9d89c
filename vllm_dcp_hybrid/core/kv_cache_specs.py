# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's KV cache specs: where each kind lives, and the geometry that follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1 import kv_cache_interface as specs

from vllm_dcp_hybrid import activation, hooks
from vllm_dcp_hybrid.errors import UnplacedSpec, UnsupportedSpec
from vllm_dcp_hybrid.geometry import CacheGeometry, GroupGeometry, common_geometry
from vllm_dcp_hybrid.placement import Placement

# Exact classes, not subclasses: a subclass may change what a block means (sinks, gaps), and is refused by name until
# somebody has looked at it or placed it through the hook.
_SHARDED = (specs.FullAttentionSpec, specs.MLAAttentionSpec)
_NOT_YET: tuple[tuple[str, str, str], ...] = (
    # (class name, what it is, why it waits); by name, since older and newer releases lack some of them
    ("SlidingWindowSpec", "sliding-window attention", "stock vLLM sizes its cache and lookups for one rank only"),
    ("SlidingWindowMLASpec", "sliding-window MLA", "stock vLLM sizes its cache and lookups for one rank only"),
    ("ChunkedLocalAttentionSpec", "chunked local attention", "its prefix lookup assumes one block size for all groups"),
    ("SinkFullAttentionSpec", "full attention with stored sinks", "the sink tokens would be split over the ranks"),
    ("RSWASpec", "reference sliding-window attention", "it evicts tokens by position on one rank only"),
    ("TQFullAttentionSpec", "TurboQuant attention", "its backend does not return the softmax LSE"),
    ("CrossAttentionSpec", "cross attention", "the encoder's keys are written once, by position on one rank"),
    ("CircularBufferSpec", "a circular buffer", "it overwrites tokens by position on one rank"),
    ("KpoolTailSpec", "the tail of a pooled indexer", "one rank overwrites its one block by position"),
    ("HiSparseHotSpec", "HiSparse attention", "its resident pages are chosen on one rank"),
    ("HiSparseResidentSpec", "HiSparse attention", "its resident pages are chosen on one rank"),
    ("HiddenStateCacheSpec", "extracted hidden states", "they are read back by position on one rank"),
)


def builtin_placement(spec: specs.KVCacheSpec) -> Placement | None:
    """Where vLLM's own kinds of cache live; None for a kind that has no rule."""
    if type(spec) in _SHARDED:
        return Placement.SHARDED
    if isinstance(spec, specs.MambaSpec):
        return Placement.REPLICATED
    if isinstance(spec, specs.EncoderOnlyAttentionSpec):
        return Placement.NONE
    if isinstance(spec, specs.UniformTypeKVCacheSpecs):
        inner = {place(layer_spec, layer=layer) for layer, layer_spec in spec.kv_cache_specs.items()}
        return inner.pop() if len(inner) == 1 else None
    return None


def place(spec: specs.KVCacheSpec, layer: str = "(unnamed)") -> Placement:
    """Where the tokens of ``spec`` live under DCP.

    Raises:
        UnsupportedSpec: for a kind that is known and waits for a later version.
        UnplacedSpec: for a kind that neither a plugin nor a built-in rule places.
    """
    answer = hooks.plugin_manager().hook.dcp_placement(spec=spec)
    answer = builtin_placement(spec) if answer is None else Placement(answer)
    if answer is None:
        for cls in type(spec).__mro__:
            for name, kind, why in _NOT_YET:
                if cls.__name__ == name:
                    raise UnsupportedSpec(layer=layer, kind=kind, why=why)
        raise UnplacedSpec(layer=layer, spec=f"{type(spec).__module__}.{type(spec).__qualname__}")
    if answer is Placement.NONE and not isinstance(spec, specs.EncoderOnlyAttentionSpec):
        raise UnsupportedSpec(layer=layer, kind="a cache that stores nothing", why="vLLM gives it blocks all the same")
    if answer is Placement.SHARDED:
        _refuse_windows_in_disguise(spec, layer)
    return answer


def _refuse_windows_in_disguise(spec: specs.KVCacheSpec, layer: str) -> None:
    """With the hybrid manager switched off, vLLM stores windowed layers in full-attention specs."""
    for inner in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if getattr(inner, "sliding_window", None) is not None:
            raise UnsupportedSpec(
                layer=layer, kind="sliding-window attention", why="a window over local positions is wrong"
            )
        if getattr(inner, "attention_chunk_size", None) is not None:
            raise UnsupportedSpec(
                layer=layer, kind="chunked local attention", why="chunks of local positions are wrong"
            )


def _representative(spec: specs.KVCacheSpec) -> Any:
    """One layer's spec of a group whose layers differ in shape only; the spec itself otherwise."""
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if inner else spec


def group_geometry(
    spec: specs.KVCacheSpec,
    *,
    dcp_world_size: int,
    interleave_size: int = 1,
    recurrent_mode: str | None = None,
    layer_names: Iterable[str] = ("(unnamed)",),
) -> GroupGeometry:
    """The geometry of one KV cache group.

    Args:
        spec: the group's spec as the workers know it (one rank's block size).
        dcp_world_size: ranks of the DCP group.
        interleave_size: tokens of one rank before the next rank's turn.
        recurrent_mode: ``mamba_cache_mode`` of the engine; the spec's own where it is None.
        layer_names: the group's layers, for messages and for counting.

    Raises:
        UnsupportedSpec, UnplacedSpec: see :func:`place`.
    """
    layers = list(layer_names)
    placement = place(spec, layer=layers[0] if layers else "(unnamed)")
    member = _representative(spec)
    is_recurrent = isinstance(member, specs.MambaSpec)
    # The page of a group whose layers differ in shape is that of all of them together.
    num_pages = len(getattr(spec, "kv_cache_specs", ())) or 1
    return GroupGeometry(
        placement=placement,
        block_size=spec.block_size,
        dcp_world_size=dcp_world_size,
        # Only a sharded group is dealt out; the others have no interleave.
        interleave_size=interleave_size if placement is Placement.SHARDED else 1,
        recurrent_mode=(recurrent_mode or member.mamba_cache_mode) if is_recurrent else None,
        num_speculative_blocks=member.num_speculative_blocks if is_recurrent else 0,
        page_size_bytes=spec.page_size_bytes // num_pages,
        num_layers=len(layers),
    )


def cache_geometry(kv_cache_config: Any, vllm_config: Any) -> CacheGeometry:
    """The geometry of all groups of an engine, from vLLM's ``KVCacheConfig`` and ``VllmConfig``.

    Must be given specs with one rank's block sizes, never the scaled ones of :func:`scheduler_kv_cache_config`.
    """
    return common_geometry(
        [
            group_geometry(
                group.kv_cache_spec,
                dcp_world_size=activation.dcp_world_size(vllm_config),
                interleave_size=activation.interleave_size(vllm_config),
                recurrent_mode=vllm_config.cache_config.mamba_cache_mode,
                layer_names=group.layer_names,
            )
            for group in kv_cache_config.kv_cache_groups
        ]
    )


def scheduler_kv_cache_config(kv_cache_config: Any, dcp_world_size: int) -> Any:
    """A copy of ``kv_cache_config`` whose sharded specs have their effective block size.

    With it, and a DCP size of 1, stock's managers, hash views and lookups count right by themselves.  Only the
    scheduler's own objects may see it: page sizes of a scaled spec are meaningless.
    """

    def scaled(group: Any) -> Any:
        spec = group.kv_cache_spec
        geometry = group_geometry(spec, dcp_world_size=dcp_world_size, layer_names=group.layer_names)
        if not geometry.is_sharded:
            return group
        return replace(group, kv_cache_spec=replace(spec, block_size=geometry.effective_block_size))

    return replace(kv_cache_config, kv_cache_groups=[scaled(group) for group in kv_cache_config.kv_cache_groups])
