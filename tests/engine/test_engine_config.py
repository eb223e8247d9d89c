# SPDX-License-Identifier: Apache-2.0
"""Real configurations of tiny models, through vLLM's `EngineArgs`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.engine.checks import check_config
from vllm_dcp_hybrid.errors import IllegalWorldSize, PluginNotApplied, UnsupportedFeature

pytestmark = pytest.mark.contract

Build = Callable[..., Any]
HYBRIDS = ("qwen3-next", "qwen3.5", "lfm2")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_with_dcp_is_active(build: Build, kind: str) -> None:
    config = build(kind)
    assert config.model_config.is_hybrid
    assert activation.is_active(config)
    assert activation.dcp_world_size(config) == 2
    assert config.additional_config == {}


def test_dcp_1_is_not(build: Build) -> None:
    assert not activation.is_active(build(decode_context_parallel_size=1))


def test_a_dense_model_with_dcp_is_active_on_a_cpu_and_there_only(build: Build) -> None:
    config = build("llama")
    assert activation.is_active(config)
    config.device_config.device_type = "cuda"
    assert not activation.is_active(config)


@pytest.mark.parametrize(
    ("kv_heads", "tp", "dcp", "largest"), [(1, 4, 3, 4), (1, 4, 8, 4), (2, 8, 8, 4), (2, 4, 4, 2), (2, 2, 2, 1)]
)
def test_case_07_an_illegal_size_is_refused_before_anything_is_loaded(
    build: Build, kv_heads: int, tp: int, dcp: int, largest: int
) -> None:
    """CASES 7: from the model's own head counts."""
    with pytest.raises(IllegalWorldSize, match=rf"-dcp {largest}\b"):
        build(num_key_value_heads=kv_heads, tensor_parallel_size=tp, decode_context_parallel_size=dcp)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_case_07_a_dense_model_gets_our_words_on_a_cpu_and_stocks_elsewhere(
    build: Build, monkeypatch: pytest.MonkeyPatch, is_cpu: bool
) -> None:
    """CASES 7: stock's refusals of models that are not ours stay as they are."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    error, words = (IllegalWorldSize, r"-dcp 2\b") if is_cpu else (ValueError, STOCKS_WORDS_FOR_SIZES)
    with pytest.raises(error, match=words):
        build("llama", num_key_value_heads=2, decode_context_parallel_size=4)


@pytest.mark.parametrize("size", [0, -1])
def test_case_07_sizes_below_1_never_make_the_plugin_act(build: Build, size: int) -> None:
    """CASES 7: stock refuses them, but -1 before 0.23; `activation` counts them as 1 all the same."""
    config = None
    with contextlib.suppress(ValueError, ZeroDivisionError):
        config = build(decode_context_parallel_size=size)
    assert config is None or (activation.dcp_world_size(config) == 1 and not activation.is_active(config))


def connector(vllm_engine: Any) -> Any:
    return vllm_engine.config.KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={"num_cpu_blocks": 100}
    )


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "Prefill context parallelism": {"prefill_context_parallel_size": 2},
    "A KV connector": {"kv_transfer_config": connector},
    "A KV connector (": {"kv_offloading_size": 1.0},
    "Speculative decoding": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
    "Returning routed experts": {"enable_return_routed_experts": True},
    "A quantised KV cache on a CPU": {"kv_cache_dtype": "fp8"},
}


# What releases refuse themselves while they build the configuration: new ones on the V1 runner, and 0.20 and 0.21.
STOCKS_WORDS = (
    "does not support: prefill context parallel|requires Model Runner V2|Model Runner V2 requires|"
    "incompatible with context parallelism|not compatible with FP8 KV cache|not yet validated with"
)
STOCKS_WORDS_FOR_SIZES = "parallel size must less than or equal|exceeds the maximum supported value"


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_is_not_supported_is_refused(build: Build, vllm_engine: Any, feature: str) -> None:
    arguments = {name: value(vllm_engine) if callable(value) else value for name, value in UNSUPPORTED[feature].items()}
    with pytest.raises((UnsupportedFeature, ValueError, RuntimeError), match=f"^{re.escape(feature)}|{STOCKS_WORDS}"):
        build(**arguments)


def test_the_same_features_are_nobodys_business_without_dcp(build: Build) -> None:
    build(decode_context_parallel_size=1, **UNSUPPORTED["Speculative decoding"])


def test_the_v2_runner_is_refused(build: Build, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock itself refuses it without Triton, as on a CPU; where stock would run it, we refuse it."""
    config = build()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises((UnsupportedFeature, ValueError), match=r"(?i)V2.model.runner|model runner V2"):
        build()
    monkeypatch.setattr(vllm_engine.config.VllmConfig, "use_v2_model_runner", True, raising=False)
    with pytest.raises(UnsupportedFeature, match=r"The V2 model runner.*unset VLLM_USE_V2_MODEL_RUNNER"):
        check_config(config)


@pytest.mark.parametrize("flag", ["cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"])
def test_either_flag_of_the_interleave_reaches_the_workers(build: Build, flag: str) -> None:
    """The older one is honoured by stock in the engine core only."""
    config = build(**{flag: 16})
    assert activation.interleave_size(config) == 16
    assert config.parallel_config.cp_kv_cache_interleave_size == 16


class TestKillSwitch:
    @pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
    def test_it_travels_in_the_config(self, build: Build, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("DCP_HYBRID", value)
        config = build()
        assert config.additional_config == {"dcp_hybrid": {"enabled": False}}
        monkeypatch.delenv("DCP_HYBRID")
        # As in a worker that lacks the variable.
        assert not activation.is_active(config)

    @pytest.mark.parametrize("value", ["1", "true", ""])
    def test_other_values_do_not_switch_off(self, build: Build, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("DCP_HYBRID", value)
        assert activation.is_active(build())

    def test_it_is_not_mentioned_where_there_is_nothing_to_switch_off(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DCP_HYBRID", "0")
        assert build(decode_context_parallel_size=1).additional_config == {}

    def test_case_30_switched_off_nothing_of_ours_is_refused(
        self, build: Build, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CASES 30: what stock says is what the user sees."""
        monkeypatch.setenv("DCP_HYBRID", "0")
        build(**UNSUPPORTED["Speculative decoding"])
        with pytest.raises(ValueError, match=STOCKS_WORDS_FOR_SIZES):
            build(num_key_value_heads=2, decode_context_parallel_size=4)

    def test_case_30_against_the_demand_it_stops(self, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        """CASES 30."""
        monkeypatch.setenv("DCP_HYBRID", "0")
        with pytest.raises(PluginNotApplied, match="DCP_HYBRID=0"):
            build(additional_config={"dcp_hybrid": {"required": True}})


def test_case_30_the_demand_stops_where_the_patches_are_not_applied(
    build: Build, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 30: the entry patches are there to say why the others are not."""
    status = dataclasses.replace(vllm_engine.plugin.status(), feature=None, refusal="somebody changed the scheduler")
    monkeypatch.setattr(vllm_engine.plugin, "_status", status)
    with pytest.raises(PluginNotApplied, match="somebody changed the scheduler"):
        build(additional_config={"dcp_hybrid": {"required": True}})
    # Without the demand stock's refusal protects the user, later.
    build()


def test_one_line_says_what_is_in_effect(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        build(cp_kv_cache_interleave_size=16, dcp_comm_backend="a2a")
    (line,) = (r.getMessage() for r in caplog.records if r.name == "vllm.dcp_hybrid")
    assert "API server" in line
    assert line.endswith("size 2, interleave 16, a2a")


@pytest.fixture
def without_plugin(vllm_engine: Any) -> Iterator[Callable[[], None]]:
    """Call it to take the plugin away; it is back after the test."""
    yield vllm_engine.plugin.undo_patches
    vllm_engine.plugin.apply_patches()


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a configuration, but for identities and addresses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found: dict[str, str] = {}
        for name, inner in sorted(vars(value).items()):
            found |= flatten(inner, f"{path}.{name}")
        return found
    if path.endswith((".instance_id", "_id")):
        return {}
    return {path: re.sub(r"0x[0-9a-f]+", "0x", repr(value))}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("llama", {"decode_context_parallel_size": 1}),
        ("llama", {}),
        ("llama", {"decode_context_parallel_size": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3-next", {"decode_context_parallel_size": 1}),
        ("lfm2", {"decode_context_parallel_size": 1, "enable_prefix_caching": True}),
    ],
    ids=["llama", "llama_dcp_2", "llama_pp_2", "qwen3_next", "lfm2_prefix_caching"],
)
def test_case_29_installed_and_idle_the_configuration_is_stocks(
    build: Build, without_plugin: Callable[[], None], kind: str, arguments: dict[str, Any]
) -> None:
    """CASES 29: to the last leaf, and with the same hash for compile caches."""
    ours = build(kind, **arguments)
    without_plugin()
    stock = build(kind, **arguments)
    assert flatten(ours) == flatten(stock)
    assert len(flatten(ours)) > 100
    assert ours.compute_hash() == stock.compute_hash()
