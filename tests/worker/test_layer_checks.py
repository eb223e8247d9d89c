# SPDX-License-Identifier: Apache-2.0
"""What is refused once the model's layers exist, before their weights load."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.errors import BackendWithoutLSE, UnplacedSpec, UnsupportedAttention, UnsupportedSpec
from vllm_dcp_hybrid.placement import Placement

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def checks(scenes: Any) -> Any:
    """The module under test, which imports vLLM."""
    return importlib.import_module("vllm_dcp_hybrid.worker.layer_checks")


def impl(**changes: Any) -> Any:
    values = {"need_to_return_lse_for_decode": True, "sinks": None, "alibi_slopes": None}
    return SimpleNamespace(**values | changes)


@pytest.fixture
def make_layer(scenes: Any) -> Any:
    """A layer of the class that vLLM looks for, with a spec and an implementation."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):  # type: ignore[misc]
        def __init__(self, spec: Any, implementation: Any, backend: str = "FLEX_ATTENTION") -> None:
            self.spec, self.impl, self.backend = spec, implementation, backend

        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: self.backend)

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return self.spec

    return Layer


def config_with(scenes: Any, layers: dict[str, Any], dcp: int = 2) -> Any:
    config = scenes.engine_config(dcp=dcp)
    config.compilation_config.static_forward_context = layers
    return config


def test_a_hybrid_of_full_attention_and_recurrent_layers_passes(scenes: Any, checks: Any, make_layer: Any) -> None:
    """Recurrent layers have no attention implementation at all."""
    layers = {
        "layers.0": make_layer(scenes.recurrent_spec(), None),
        "layers.3": make_layer(scenes.attention_spec(), impl()),
        "layers.7": make_layer(scenes.mla_spec(), impl()),
        "encoder": make_layer(None, impl(need_to_return_lse_for_decode=False)),
        "moe": object(),
    }
    checks.check_layers(config_with(scenes, layers))


@pytest.mark.parametrize(("is_cpu", "alternative"), [(True, "CPU_ATTN"), (False, "FLASH_ATTN")], ids=["cpu", "gpu"])
def test_a_backend_without_the_lse_is_named_and_an_alternative_too(
    scenes: Any, checks: Any, make_layer: Any, monkeypatch: pytest.MonkeyPatch, is_cpu: bool, alternative: str
) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: is_cpu, raising=False)
    layer = make_layer(scenes.attention_spec(), impl(need_to_return_lse_for_decode=False))
    with pytest.raises(BackendWithoutLSE) as caught:
        checks.check_layers(config_with(scenes, {"model.layers.3.attn": layer}))
    message = str(caught.value)
    assert "Layer model.layers.3.attn runs on the attention backend FLEX_ATTENTION" in message
    assert f"--attention-backend {alternative}" in message
    assert "-dcp 1" in message


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"sinks": object()}, "attention sinks"),
        ({"alibi_slopes": object()}, "ALiBi"),
        ({"kv_sharing_target_layer_name": "layers.1"}, "another layer's KV cache"),
    ],
    ids=["sinks", "alibi", "kv_sharing"],
)
def test_attention_that_would_be_wrong_over_a_shard_is_refused(
    checks: Any, changes: dict[str, Any], feature: str
) -> None:
    layer = SimpleNamespace(impl=impl(**changes))
    with pytest.raises(UnsupportedAttention, match=f"^Layer l uses {feature}, which would be wrong .* because "):
        checks.check_sharded_attention("l", layer)


def test_attention_that_a_plugin_places_whole_on_every_rank_has_no_backend_yet(
    scenes: Any, checks: Any, make_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes.adapter, "place", lambda spec, layer: Placement.REPLICATED)
    with pytest.raises(UnsupportedSpec, match=r"^Layer l uses attention that is whole on every rank"):
        checks.check_layers(config_with(scenes, {"l": make_layer(scenes.attention_spec(), impl())}))
    # Recurrent layers are exactly that, without attention.
    checks.check_layers(config_with(scenes, {"l": make_layer(scenes.recurrent_spec(), None)}))


def test_a_sharded_cache_without_attention_is_refused(scenes: Any, checks: Any, make_layer: Any) -> None:
    with pytest.raises(UnsupportedSpec, match=r"^Layer l uses a sharded cache without an attention backend"):
        checks.check_layers(config_with(scenes, {"l": make_layer(scenes.attention_spec(), None)}))


def test_an_unplaced_or_waiting_spec_is_refused_with_the_name_of_its_layer(
    scenes: Any, checks: Any, make_layer: Any
) -> None:
    window = scenes.specs.SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=scenes.torch.bfloat16, sliding_window=64
    )
    with pytest.raises(UnsupportedSpec, match=r"^Layer layers\.1 uses sliding-window attention"):
        checks.check_layers(config_with(scenes, {"layers.1": make_layer(window, impl())}))
    unknown = scenes.specs.KVCacheSpec(block_size=16)
    with pytest.raises(UnplacedSpec, match=r"^Layer layers\.2 has a KV cache of type"):
        checks.check_layers(config_with(scenes, {"layers.2": make_layer(unknown, impl())}))


def test_the_check_runs_once_the_model_is_built_and_only_where_the_plugin_is_active(
    scenes: Any, checks: Any, make_layer: Any
) -> None:
    layers = {"l": make_layer(scenes.attention_spec(), impl(need_to_return_lse_for_decode=False))}
    built = []

    def original(vllm_config: Any) -> str:
        built.append(vllm_config)
        return "model"

    assert checks.initialize_model(original, None, (config_with(scenes, layers, dcp=1),), {}) == "model"
    with pytest.raises(BackendWithoutLSE):
        checks.initialize_model(original, None, (), {"vllm_config": config_with(scenes, layers)})
    assert len(built) == 2
