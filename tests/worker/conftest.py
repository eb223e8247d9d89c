# SPDX-License-Identifier: Apache-2.0
"""Tests of the worker side ask for vLLM's objects through `scenes` and make runners with `make_runner`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.worker import startup


@pytest.fixture(scope="session")
def scenes() -> Any:
    """The module `hybrid_scenes` of the scheduler side's tests, and vLLM's runner, with the plugin applied."""
    sys.path.append(str(Path(__file__).parents[1] / "core"))
    with warnings.catch_warnings():
        # Torch and vLLM deprecate parts of each other while they are imported.
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # the first configuration imports it
        module: Any = importlib.import_module("hybrid_scenes")
        module.runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
        module.block_table = importlib.import_module("vllm.v1.worker.block_table")
    assert module.plugin.apply_patches().is_applied, module.plugin.status().refusal
    return module


@pytest.fixture
def cpu_engine(scenes: Any) -> Iterator[None]:
    """A worker in which the plugin's CPU backend serves: from 0.26 on it brings the slot mapping."""
    startup.register_attention_backends(startup._CPU)
    yield
    startup.withdraw_attention_backends()


@pytest.fixture
def set_dcp_group(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretend to be one rank of a DCP group: (world size, rank)."""

    def set_group(world_size: int, rank: int) -> None:
        group = SimpleNamespace(world_size=world_size, rank_in_group=rank)
        monkeypatch.setattr(scenes.block_table, "get_dcp_group", lambda: group)
        for module in (scenes.block_table, scenes.runner):
            if hasattr(module, "get_total_cp_world_size"):  # before 0.26
                monkeypatch.setattr(module, "get_total_cp_world_size", lambda: world_size)

    return set_group


@pytest.fixture
def make_runner(scenes: Any, set_dcp_group: Any) -> Callable[..., Any]:
    """A runner of one rank whose tables were built by vLLM's own `may_reinitialize_input_batch`."""

    def make(
        group_specs: Sequence[Any],
        *,
        dcp: int,
        rank: int = 0,
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_reqs: int = 3,
        **options: Any,
    ) -> Any:
        set_dcp_group(dcp, rank)
        config = scenes.engine_config(dcp=min(dcp, 4), **options)
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.rank = rank
        groups = scenes.cache_config(group_specs)
        runner = object.__new__(scenes.runner.GPUModelRunner)
        runner.vllm_config = config
        runner.cache_config, runner.model_config = config.cache_config, config.model_config
        runner.parallel_config = config.parallel_config
        runner.max_model_len, runner.max_encoder_len = config.model_config.max_model_len, 0
        runner.max_num_reqs, runner.max_num_tokens = max_num_reqs, 512
        runner.device = scenes.torch.device("cpu")
        runner.num_spec_tokens, runner.is_pooling_model = 0, False
        runner.pin_memory = False  # up to 0.23
        runner.input_batch = SimpleNamespace(logitsprocs=None, logitsprocs_need_output_token_ids=False)
        runner._init_block_sizes = runner._init_kernel_block_sizes = [16]
        blocks = [spec.block_size for spec in group_specs if "EncoderOnly" not in type(spec).__name__]
        # From 0.26 on.
        runner._init_max_num_blocks = runner._init_slot_mapping_modes = []
        runner.cp_kv_cache_interleave_size = config.parallel_config.cp_kv_cache_interleave_size
        runner.jit_warmup_registry = SimpleNamespace(activate=contextlib.nullcontext)
        arguments = {"kv_cache_config": groups, "kernel_block_sizes": list(kernel_block_sizes or blocks)}
        accepted = inspect.signature(runner.may_reinitialize_input_batch).parameters
        runner.may_reinitialize_input_batch(**{name: arguments[name] for name in arguments if name in accepted})
        runner.kv_cache_config = groups
        return runner

    return make
