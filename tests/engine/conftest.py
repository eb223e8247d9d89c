# SPDX-License-Identifier: Apache-2.0
"""Tests of the API process ask for vLLM through `vllm_engine`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_engine() -> Any:
    """`EngineArgs`, `AsyncEngineArgs`, `parser()`, `config` and `plugin`, which is applied as vLLM applies it."""
    with warnings.catch_warnings():
        # Torch and vLLM deprecate parts of each other while they are imported.
        warnings.simplefilter("ignore")
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
        importlib.import_module("torch._inductor.compile_fx")  # the first configuration imports it
        importlib.import_module("vllm.plugins").load_general_plugins()
    plugin = importlib.import_module("vllm_dcp_hybrid.plugin")
    # Another test may have taken it away.
    assert plugin.apply_patches().is_applied, plugin.status().refusal
    return SimpleNamespace(
        EngineArgs=arg_utils.EngineArgs,
        AsyncEngineArgs=arg_utils.AsyncEngineArgs,
        parser=lambda: arg_utils.AsyncEngineArgs.add_cli_args(argparse_utils.FlexibleArgumentParser()),
        config=importlib.import_module("vllm.config"),
        plugin=plugin,
    )


@pytest.fixture(scope="session")
def build(vllm_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A real `VllmConfig` for a tiny model: 8 query heads, 1 KV head, TP 4, DCP 2 unless told otherwise."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from vllm_dcp_hybrid.tiny_models import engine_arguments, make_tiny_model

    folder: Path = tmp_path_factory.mktemp("models")

    def build(kind: str = "qwen3-next", *, num_key_value_heads: int = 1, **arguments: Any) -> Any:
        model = make_tiny_model(
            kind, folder / f"{kind}-{num_key_value_heads}", num_layers=4, num_key_value_heads=num_key_value_heads
        )
        sizes = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
        everything = {**engine_arguments(kind), **sizes, **arguments}
        # vLLM puts its own configurations into the registry of transformers, for the whole process.
        registered = dict(CONFIG_MAPPING._extra_content)
        try:
            return vllm_engine.EngineArgs(model=str(model), **everything).create_engine_config()
        finally:
            CONFIG_MAPPING._extra_content.clear()
            CONFIG_MAPPING._extra_content.update(registered)

    return build


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DCP_HYBRID", "VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
