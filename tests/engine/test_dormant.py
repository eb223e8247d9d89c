# SPDX-License-Identifier: Apache-2.0
"""Installed and idle (CASES 29): every wrapper hands its original the very objects that it was called with."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES
from vllm_dcp_hybrid.patching import select
from vllm_dcp_hybrid.patching.wrapper import resolve

pytestmark = pytest.mark.contract

_VLLM = find_vllm()
# Of the installed release: names are shared by variants for different releases.
WRAPS = {
    patch.name: patch.replacement
    for patch in (select(ALL_PATCHES, _VLLM.version) if _VLLM else ())
    if patch.how == "wrap"
}

# Why a vLLM configuration leaves the plugin idle -> (DCP size, is hybrid, additional_config).
IDLE: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "dcp_1": (1, True, {}),
    "dense": (2, False, {}),
    "switched_off": (2, True, {"dcp_hybrid": {"enabled": False}}),
}


def make_config(dcp: int, is_hybrid: bool, additional_config: dict[str, Any]) -> Any:
    return SimpleNamespace(
        additional_config=additional_config,
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, local_world_size=2),
        model_config=SimpleNamespace(is_hybrid=is_hybrid),
        cache_config=SimpleNamespace(block_size=16),
        # On a CPU no model with DCP leaves the plugin idle.
        device_config=SimpleNamespace(device_type="cuda"),
    )


def make_groups(num_groups: int) -> Any:
    return SimpleNamespace(kv_cache_groups=[object() for _ in range(num_groups)])


GPU = SimpleNamespace(is_cpu=lambda: False)

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
CallMaker = Callable[[Any, bool], Call]


def _scheduler(config: Any) -> Any:
    dcp = config.parallel_config.decode_context_parallel_size
    # Where DCP is on but the plugin is not, there is one group, and its scheduler block is what stock made it.
    return SimpleNamespace(
        block_size=16, cache_config=config.cache_config, dcp_world_size=dcp, use_eagle=False, vllm_config=config
    )


CALLS: dict[str, CallMaker] = {
    "cli-enable-plugin": lambda config, _: (None, (argparse.ArgumentParser(),), {}),
    "cli-carry-demand": lambda config, _: (None, (argparse.Namespace(),), {}),
    "config-switches": lambda config, _: (object(), (object(),), {"headless": object()}),
    "config-world-size": lambda config, _: (
        SimpleNamespace(
            decode_context_parallel_size=config.parallel_config.decode_context_parallel_size, tensor_parallel_size=3
        ),
        (),
        {},
    ),
    "resolve-block-sizes": lambda config, _: (None, (make_groups(4), config), {}),
    "kv-cache-coordinator": lambda config, is_dense: (
        None,
        (),
        {
            "kv_cache_config": make_groups(1 if is_dense else 4),
            "dcp_world_size": config.parallel_config.decode_context_parallel_size,
            "hash_block_size": object(),
        },
    ),
    "prefill-chunk-ends": lambda config, _: (_scheduler(config), (object(), 99), {"num_external_computed_tokens": 0}),
    "engine-core-report": lambda config, _: (_scheduler(config), (object(),), {"block_size": object()}),
    "cpu-cores-per-rank": lambda config, _: (object(), (config,), {}),
    "cpu-page-alignment": lambda config, _: (object(), (config,), {}),
    "worker-backends": lambda config, _: (object(), (config,), {"rank": object()}),
    "layer-checks": lambda config, _: (None, (config,), {"prefix": object()}),
    "block-tables-per-group": lambda config, _: (SimpleNamespace(vllm_config=config), (make_groups(4), [16]), {}),
    "block-table-geometry": lambda config, _: (
        SimpleNamespace(block_tables=[object()]),
        tuple(object() for _ in range(7)),
        {"max_num_blocks": object(), "cp_kv_cache_interleave_size": object()},
    ),
    "slot-mapping": lambda config, _: (SimpleNamespace(), (object(), object(), object()), {}),
    "cpu-state-copies": lambda config, _: (None, (object(), object(), object()), {}),
    "whole-block-copies": lambda config, _: (None, ([object()], object(), object()), {}),
    "worker-report": lambda config, _: (SimpleNamespace(vllm_config=config, rank=0), (object(),), {}),
    "fresh-recurrent-state": lambda config, _: (SimpleNamespace(vllm_config=config), (object(),), {}),
}

# These cannot know that they were switched off; they are not reached then, for the block sizes are stock's refusal.
NOT_REACHED = {("kv-cache-coordinator", "switched_off")}


@pytest.fixture(autouse=True)
def _plugin(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers are those of a process in which the plugin is applied, on a machine with GPUs."""
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "current_platform", GPU, raising=False)


def switch_off(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a configuration, the variable itself is asked."""
    if why == "switched_off":
        monkeypatch.setenv("DCP_HYBRID", "0")


def run(name: str, config: Any, *, is_dense: bool) -> tuple[Call, list[tuple[Any, ...]], Any, Any]:
    """(the call, what the original got, its answer, the wrapper's answer)."""
    instance, args, kwargs = CALLS[name](config, is_dense)
    answers = {
        "cli-enable-plugin": argparse.ArgumentParser(),
        "cli-carry-demand": SimpleNamespace(additional_config={}),
        "config-switches": config,
        "config-world-size": config.model_config,
    }
    answer = answers.get(name, object())
    seen: list[tuple[Any, ...]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return answer

    return (instance, args, kwargs), seen, answer, resolve(WRAPS[name])(original, instance, args, dict(kwargs))


@pytest.mark.parametrize("why", IDLE)
@pytest.mark.parametrize("name", WRAPS)
def test_case_29_an_idle_wrapper_passes_the_same_objects_on(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 29."""
    switch_off(why, monkeypatch)
    if (name, why) in NOT_REACHED:
        pytest.skip("not reached")
    config = make_config(*IDLE[why])
    (_, args, kwargs), seen, answer, found = run(name, config, is_dense=why == "dense")
    ((got_args, got_kwargs),) = seen
    assert len(got_args) == len(args)
    assert all(got is given for got, given in zip(got_args, args, strict=True))
    assert got_kwargs.keys() == kwargs.keys()
    assert all(got_kwargs[key] is kwargs[key] for key in kwargs)
    # A constructor's wrapper has nothing to return.
    returns_nothing = {"worker-backends", "block-table-geometry", "cpu-cores-per-rank", "slot-mapping"}
    returns_nothing |= {"cpu-page-alignment", "cpu-state-copies", "engine-core-report", "whole-block-copies"}
    assert found is answer or (name in returns_nothing and found is None)


@pytest.mark.parametrize("why", IDLE)
def test_case_29_an_idle_configuration_is_left_as_it_is(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 29."""
    switch_off(why, monkeypatch)
    config = make_config(*IDLE[why])
    before = {key: dict(vars(value)) for key, value in vars(config).items() if isinstance(value, SimpleNamespace)}
    for name in WRAPS:
        if (name, why) not in NOT_REACHED:
            run(name, config, is_dense=why == "dense")
    after = {key: dict(vars(value)) for key, value in vars(config).items() if isinstance(value, SimpleNamespace)}
    assert after == before
    assert config.additional_config == IDLE[why][2]


def test_case_29_no_wrapper_is_left_out() -> None:
    """CASES 29: a new patch needs a line in the table above."""
    assert WRAPS.keys() <= CALLS.keys()
    assert CALLS.keys() <= {patch.name for patch in ALL_PATCHES if patch.how == "wrap"}


def test_case_29_an_idle_worker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 29: vLLM's registry is touched where the plugin is active, and there only."""
    from vllm_dcp_hybrid.worker import startup

    class Worker:
        def init_device(self) -> None: ...

    calls: list[str] = []
    monkeypatch.setattr(startup, "register_attention_backends", lambda _: calls.append("registered"))
    for idle in IDLE.values():
        worker = Worker()
        startup.worker_base_init(lambda *args: None, worker, (make_config(*idle),), {})
        assert vars(worker) == {}
    assert calls == []
    startup.worker_base_init(lambda *args: None, Worker(), (make_config(2, True, {}),), {})
    assert calls == ["registered"]
