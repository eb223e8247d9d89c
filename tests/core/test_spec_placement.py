# SPDX-License-Identifier: Apache-2.0
"""Where each kind of vLLM's KV cache specs lives, and which kinds are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from vllm_dcp_hybrid import hooks
from vllm_dcp_hybrid.errors import UnplacedSpec, UnsupportedSpec
from vllm_dcp_hybrid.hooks import Placement, hookimpl

pytestmark = pytest.mark.contract


def make_spec(scenes: Any, name: str, **more: Any) -> Any:
    """A spec of one of vLLM's classes by its name."""
    cls = getattr(scenes.specs, name)
    attention = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": scenes.torch.bfloat16}
    extra = {
        "SlidingWindowSpec": {"sliding_window": 128},
        "SlidingWindowMLASpec": {"sliding_window": 128},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 128},
        "SinkFullAttentionSpec": {"sink_len": 16},
        "RSWASpec": {"rswa_window": 128},
    }
    return cls(**attention, **extra.get(name, {}), **more)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FullAttentionSpec", Placement.SHARDED),
        ("MLAAttentionSpec", Placement.SHARDED),
        ("EncoderOnlyAttentionSpec", Placement.NONE),
    ],
)
def test_attention_that_is_placed(scenes: Any, name: str, expected: Placement) -> None:
    assert scenes.adapter.place(make_spec(scenes, name)) is expected


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_recurrent_states_are_replicated_in_every_mode(scenes: Any, mode: str) -> None:
    assert scenes.adapter.place(scenes.recurrent_spec(mode=mode)) is Placement.REPLICATED


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SlidingWindowSpec", "uses sliding-window attention"),
        ("SlidingWindowMLASpec", "uses sliding-window MLA"),
        ("ChunkedLocalAttentionSpec", "uses chunked local attention"),
        ("SinkFullAttentionSpec", "uses full attention with stored sinks"),
        ("RSWASpec", "uses reference sliding-window attention"),
        ("TQFullAttentionSpec", "uses TurboQuant attention"),
        ("CrossAttentionSpec", "uses cross attention"),
        ("HiddenStateCacheSpec", "uses extracted hidden states"),
    ],
)
def test_kinds_that_wait_are_refused_by_name(scenes: Any, name: str, words: str) -> None:
    if not hasattr(scenes.specs, name):
        pytest.skip(f"this vLLM has no {name}")
    with pytest.raises(UnsupportedSpec, match=f"^Layer model.layers.3 {words}.* run this model with -dcp 1.$"):
        scenes.adapter.place(make_spec(scenes, name), layer="model.layers.3")


def test_every_kind_of_spec_of_this_vllm_is_placed_or_refused_by_name(scenes: Any) -> None:
    """A release with a new kind fails here, and somebody has to look at it."""
    known = {
        "AttentionSpec",  # a base class
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "MambaSpec",
        "UniformTypeKVCacheSpecs",
        *(name for name, _, _ in scenes.adapter._NOT_YET),
    }
    found = {
        name
        for name, cls in vars(scenes.specs).items()
        if isinstance(cls, type) and issubclass(cls, scenes.specs.KVCacheSpec) and cls is not scenes.specs.KVCacheSpec
    }
    assert found <= known


@pytest.mark.parametrize("changes", [{"sliding_window": 128}, {"attention_chunk_size": 128}], ids=str)
def test_windows_in_disguise_are_refused(scenes: Any, changes: dict[str, int]) -> None:
    """--disable-hybrid-kv-cache-manager stores windowed layers in full-attention specs (TARGETS W11)."""
    spec = scenes.attention_spec(**changes)
    with pytest.raises(UnsupportedSpec, match="local positions"):
        scenes.adapter.place(spec)
    uniform = scenes.specs.UniformTypeKVCacheSpecs(
        block_size=272, kv_cache_specs={"a": scenes.attention_spec(), "b": spec}
    )
    with pytest.raises(UnsupportedSpec, match="local positions"):
        scenes.adapter.place(uniform)


def test_a_group_of_layers_in_unequal_places_is_refused(scenes: Any) -> None:
    uniform = scenes.specs.UniformTypeKVCacheSpecs(
        block_size=272, kv_cache_specs={"a": scenes.attention_spec(), "b": scenes.recurrent_spec()}
    )
    with pytest.raises(UnplacedSpec, match="UniformTypeKVCacheSpecs"):
        scenes.adapter.place(uniform)


@pytest.fixture
def unknown_class(scenes: Any) -> Any:
    @dataclass(frozen=True, kw_only=True)
    class RemoteSpec(scenes.specs.KVCacheSpec):  # type: ignore[misc,name-defined]
        @property
        def page_size_bytes(self) -> int:
            return 4096

    return RemoteSpec


@pytest.fixture
def plugin_for(unknown_class: Any) -> Iterator[Any]:
    """Registers an answer for the unknown class; gone after the test."""
    manager, registered = hooks.plugin_manager(), []

    def register(answer: Any) -> None:
        class Plugin:
            @hookimpl
            def dcp_placement(self, spec: Any) -> Any:
                return answer if isinstance(spec, unknown_class) else None

        registered.append(Plugin())
        manager.register(registered[-1])

    yield register
    for plugin in registered:
        manager.unregister(plugin)


def test_a_spec_that_nobody_places_is_refused_and_the_hook_named(scenes: Any, unknown_class: Any) -> None:
    with pytest.raises(UnplacedSpec, match=r"Layer l\.0 has a KV cache of type .*RemoteSpec.*hook `dcp_placement`"):
        scenes.adapter.place(unknown_class(block_size=16), layer="l.0")


@pytest.mark.parametrize(("answer", "num_shards"), [(Placement.SHARDED, 2), (Placement.REPLICATED, 1)])
def test_a_plugin_places_its_own_spec(
    scenes: Any, unknown_class: Any, plugin_for: Any, answer: Placement, num_shards: int
) -> None:
    plugin_for(answer)
    spec = unknown_class(block_size=16)
    assert scenes.adapter.place(spec) is answer
    assert scenes.adapter.group_geometry(spec, dcp_world_size=2).effective_block_size == 16 * num_shards
    # The built-in rules still answer for the others.
    assert scenes.adapter.place(scenes.attention_spec()) is Placement.SHARDED


def test_a_nonsense_answer_of_a_plugin_is_an_error(scenes: Any, unknown_class: Any, plugin_for: Any) -> None:
    plugin_for("somewhere")
    with pytest.raises(ValueError, match="somewhere"):
        scenes.adapter.place(unknown_class(block_size=16))


@pytest.mark.replaces("vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes")
def test_refusals_of_groups_come_before_anything_is_built(scenes: Any) -> None:
    """The engine core asks for block sizes first: a group that nobody places stops it there, layer named."""
    groups = scenes.cache_config([scenes.recurrent_spec(), make_spec(scenes, "SlidingWindowSpec")])
    with pytest.raises(UnsupportedSpec, match=r"Layer layers\.1\.0 uses sliding-window attention"):
        scenes.block_sizes(scenes.engine_config(dcp=2), groups)
