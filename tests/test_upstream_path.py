# SPDX-License-Identifier: Apache-2.0
"""Whether upstream's own hybrid DCP is in use is asked of the objects of the process."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.contract,
    pytest.mark.replaces("vllm_dcp_hybrid.core.upstream_report:scheduler_init"),
]

CORE = "vllm.v1.core"


@pytest.fixture(scope="module")
def upstream() -> Any:
    """The module, with the plugin applied and all of upstream's path loaded that a CPU build can load."""
    with warnings.catch_warnings():
        # Torch and vLLM deprecate parts of each other while they are imported.
        warnings.simplefilter("ignore")
        plugin = importlib.import_module("vllm_dcp_hybrid.plugin")
        assert plugin.apply_patches().is_applied, plugin.status().refusal
        for name in (f"{CORE}.sched.scheduler", "vllm.v1.engine.core", "vllm.v1.worker.gpu_model_runner"):
            importlib.import_module(name)
    return importlib.import_module("vllm_dcp_hybrid.upstream_path")


def names() -> tuple[str, ...]:
    declarations = importlib.import_module("vllm_dcp_hybrid.upstream_declarations")
    return (*declarations.UPSTREAM_ENGINE_CORE, *declarations.UPSTREAM_WORKER)


def test_as_released_nothing_is_exchanged(upstream: Any) -> None:
    """This plugin's own wrappers do not count."""
    assert upstream.exchanged_objects(names()) == {}


def somebody(*args: Any, **kwargs: Any) -> None:
    """Not vLLM's."""


@pytest.mark.parametrize(
    ("module", "path", "found"),
    [
        (f"{CORE}.kv_cache_utils", "resolve_kv_cache_block_sizes", "resolve_kv_cache_block_sizes"),
        # A copy that another module imported by name.
        ("vllm.v1.engine.core", "resolve_kv_cache_block_sizes", "resolve_kv_cache_block_sizes"),
        (f"{CORE}.kv_cache_manager", "get_kv_cache_coordinator", "get_kv_cache_coordinator"),
        (f"{CORE}.kv_cache_coordinator", "HybridKVCacheCoordinator.find_longest_cache_hit", None),
        (f"{CORE}.single_type_kv_cache_manager", "MambaManager.allocate_new_blocks", None),
        ("vllm.v1.worker.block_table", "BlockTable.add_row", None),
        # A method that the class only inherits in the release.
        ("vllm.v1.worker.block_table", "BlockTable.__getattribute__", None),
    ],
)
def test_what_somebody_exchanged_is_named(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, module: str, path: str, found: str | None
) -> None:
    holder: Any = importlib.import_module(module)
    *parts, attribute = path.split(".")
    for part in parts:
        holder = getattr(holder, part)
    monkeypatch.setattr(holder, attribute, somebody, raising=False)
    assert upstream.exchanged_objects(names()) == {found or path: __name__}


def test_objects_of_foreign_classes_are_named(upstream: Any) -> None:
    coordinator = type("Coordinator", (), {"__module__": "vllm.v1.core.kv_cache_coordinator"})()
    assert upstream.exchanged_types([coordinator]) == {}
    assert upstream.exchanged_types([coordinator, SimpleNamespace()]) == {"SimpleNamespace": "types"}


def hybrid_on_gpu(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "additional_config": {},
        "parallel_config": SimpleNamespace(decode_context_parallel_size=2),
        "model_config": SimpleNamespace(is_hybrid=True),
        "device_config": SimpleNamespace(device_type="cuda"),
    }
    return SimpleNamespace(**{**values, **changes})


def scheduler_of(config: Any) -> Any:
    """What the engine core's line reads of a scheduler; its coordinator is of vLLM's class."""
    module = importlib.import_module(f"{CORE}.kv_cache_coordinator")
    coordinator = object.__new__(module.HybridKVCacheCoordinator)
    coordinator.single_type_managers = ()
    return SimpleNamespace(vllm_config=config, kv_cache_manager=SimpleNamespace(coordinator=coordinator))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "vllm.dcp_hybrid"]


def test_the_engine_core_says_in_one_line_that_upstreams_path_is_in_use(
    upstream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report = importlib.import_module("vllm_dcp_hybrid.core.upstream_report")
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        report.scheduler_init(lambda *args: None, scheduler_of(hybrid_on_gpu()), (), {})
    ((level, line),) = lines(caplog)
    version = upstream.plugin.status().vllm_version
    assert level == logging.INFO
    assert f"engine core: upstream's own hybrid DCP of vLLM {version} is in use (" in line
    assert "HybridKVCacheCoordinator" in line
    assert "; this plugin adds: " in line


def test_a_foreign_override_is_a_warning_that_names_it(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = importlib.import_module("vllm_dcp_hybrid.core.upstream_report")
    module = importlib.import_module(f"{CORE}.kv_cache_coordinator")
    monkeypatch.setattr(module.HybridKVCacheCoordinator, "find_longest_cache_hit", somebody)
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        report.scheduler_init(lambda *args: None, scheduler_of(hybrid_on_gpu()), (), {})
    ((level, line),) = lines(caplog)
    assert level == logging.WARNING
    assert "is NOT in use as released: HybridKVCacheCoordinator.find_longest_cache_hit is from" in line
    assert __name__ in line


class FakeRegistry:
    """The registry's entry under the name FLASH_ATTN."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self, include_classname: bool = True) -> str:
        assert self.path is not None
        assert not include_classname
        return self.path


@pytest.mark.parametrize(("path", "level"), [(None, logging.INFO), ("their.backend", logging.WARNING)])
def test_worker_rank_0_says_whose_attention_is_in_use(
    upstream: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str | None,
    level: int,
) -> None:
    report = importlib.import_module("vllm_dcp_hybrid.worker.upstream_report")
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    monkeypatch.setattr(registry, "AttentionBackendEnum", SimpleNamespace(FLASH_ATTN=FakeRegistry(path)))
    impl = type("FlashAttentionImpl", (), {"__module__": "vllm.v1.attention.backends.flash_attn"})()
    layers = {"a": SimpleNamespace(impl=impl), "b": SimpleNamespace()}
    config = hybrid_on_gpu(compilation_config=SimpleNamespace(static_forward_context=layers))
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        for rank in (0, 1):
            worker = SimpleNamespace(rank=rank, vllm_config=config)
            assert report.initialize_from_config(lambda *args: "stock", worker, (object(),), {}) == "stock"
    ((found, line),) = lines(caplog)
    assert found == level
    assert ("(block tables, FlashAttentionImpl)" if path is None else "FLASH_ATTN is from their.backend") in line


def test_dense_models_and_switched_off_plugins_say_nothing_on_gpus(
    upstream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report = importlib.import_module("vllm_dcp_hybrid.core.upstream_report")
    with caplog.at_level(logging.INFO, logger="vllm.dcp_hybrid"):
        for changes in (
            {"model_config": SimpleNamespace(is_hybrid=False)},
            {"additional_config": {"dcp_hybrid": {"enabled": False}}},
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=1)},
        ):
            report.scheduler_init(lambda *args: None, SimpleNamespace(vllm_config=hybrid_on_gpu(**changes)), (), {})
    assert lines(caplog) == []
