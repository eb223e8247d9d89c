# SPDX-License-Identifier: Apache-2.0
"""The API process where upstream has hybrid DCP of its own: what is refused, and what is nobody's business."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.engine import checks, upstream_config
from vllm_dcp_hybrid.engine.upstream_config import create_engine_config, create_engine_config_without_v2
from vllm_dcp_hybrid.errors import SharedMemoryTooSmall, UnsupportedFeature

pytestmark = pytest.mark.contract

# Everything that the CPU engine refuses, with the words that the refusal begins with.
REFUSED_ON_CPUS: dict[str, tuple[str, Any]] = {
    "Prefill context parallelism": ("parallel_config.prefill_context_parallel_size", 2),
    "A KV connector": ("kv_transfer_config", object()),
    "The V2 model runner": ("use_v2_model_runner", True),
    "Speculative decoding": ("speculative_config", object()),
    "Returning routed experts": ("model_config.enable_return_routed_experts", True),
    "A quantised KV cache on a CPU": ("cache_config.cache_dtype", "fp8"),
}
BOTH = pytest.mark.parametrize("create", [create_engine_config, create_engine_config_without_v2])


def config(device: str, *, is_hybrid: bool = True, dcp: int = 2, change: tuple[str, Any] | None = None) -> Any:
    values = SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            dcp_comm_backend="ag_rs",
            world_size=2,
        ),
        kv_transfer_config=None,
        use_v2_model_runner=False,
        speculative_config=None,
        model_config=SimpleNamespace(is_hybrid=is_hybrid, enable_return_routed_experts=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type=device),
    )
    if change is not None:
        path, value = change
        *holders, name = path.split(".")
        holder = values
        for part in holders:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    return values


@pytest.fixture(autouse=True)
def _plugin(vllm_engine: Any) -> None:
    """The wrappers are those of a process in which the plugin is applied."""


def through(create: Any, values: Any) -> Any:
    return create(lambda *args, **kwargs: values, object(), (), {})


@BOTH
@pytest.mark.parametrize("feature", REFUSED_ON_CPUS)
@pytest.mark.parametrize("is_hybrid", [True, False])
def test_what_the_cpu_engine_cannot_do_is_refused(create: Any, feature: str, is_hybrid: bool) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{feature}.*; .*") as caught:
        through(create, config("cpu", is_hybrid=is_hybrid, change=REFUSED_ON_CPUS[feature]))
    assert " is not supported together with Decode Context Parallelism on CPUs because " in str(caught.value)


@BOTH
@pytest.mark.parametrize("feature", [name for name in REFUSED_ON_CPUS if name != "The V2 model runner"])
def test_on_gpus_that_is_upstreams_business(create: Any, feature: str) -> None:
    values = config("cuda", change=REFUSED_ON_CPUS[feature])
    assert through(create, values) is values


@BOTH
@pytest.mark.parametrize(("dcp", "is_hybrid"), [(1, True), (2, False)])
def test_without_dcp_or_without_recurrent_layers_nothing_is_refused_on_gpus(
    create: Any, dcp: int, is_hybrid: bool
) -> None:
    for change in REFUSED_ON_CPUS.values():
        values = config("cuda", dcp=dcp, is_hybrid=is_hybrid, change=change)
        assert through(create, values) is values


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_v2_runner_of_0_26_to_0_28_is_refused_for_hybrids_on_any_device(device: str) -> None:
    """Its recurrent rows are too short by the DCP size."""
    values = config(device, change=("use_v2_model_runner", True))
    with pytest.raises(UnsupportedFeature, match=r"^The V2 model runner .* too short .*VLLM_USE_V2_MODEL_RUNNER=0"):
        through(create_engine_config_without_v2, values)


def test_the_v2_runner_of_later_releases_is_not_refused_on_gpus() -> None:
    values = config("cuda", change=("use_v2_model_runner", True))
    assert through(create_engine_config, values) is values


@BOTH
def test_a_dense_model_on_the_v2_runner_is_not_refused_on_gpus(create: Any) -> None:
    values = config("cuda", is_hybrid=False, change=("use_v2_model_runner", True))
    assert through(create, values) is values


@BOTH
def test_switched_off_nothing_is_refused(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_HYBRID", "0")
    values = config("cpu", change=("use_v2_model_runner", True))
    assert through(create, values).additional_config == {"dcp_hybrid": {"enabled": False}}


@BOTH
def test_case_31_a_small_dev_shm_is_refused_on_cpus(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 31."""
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(SharedMemoryTooSmall):
        through(create, config("cpu"))
    through(create, config("cuda"))


def test_the_table_above_covers_every_feature_that_is_refused() -> None:
    names = [feature for feature, *_ in upstream_config.unsupported_on_cpu(config("cpu"))]
    assert len(names) == len(REFUSED_ON_CPUS)
    assert all(any(name.startswith(feature) for name in names) for feature in REFUSED_ON_CPUS)
