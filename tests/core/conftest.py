# SPDX-License-Identifier: Apache-2.0
"""Tests of the scheduler side ask for vLLM's objects through `scenes`."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest


@pytest.fixture(scope="session")
def scenes() -> Any:
    """The module `hybrid_scenes`, with the plugin applied to this process's vLLM."""
    with warnings.catch_warnings():
        # Torch and vLLM deprecate parts of each other while they are imported.
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # the first configuration imports it
        module = importlib.import_module("hybrid_scenes")
        status = module.plugin.apply_patches()
    assert status.is_applied, status.refusal
    return module
