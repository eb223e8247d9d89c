# SPDX-License-Identifier: Apache-2.0
"""Suites by marker.

Plain tests always run.  ``contract`` tests run where a vLLM is installed.  ``e2e`` tests start engines, which takes
minutes on two cores: they run when asked for (``-m e2e`` or ``--e2e``).
"""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="also run the tests that start real engines")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None
    asked_for = config.getoption("-m") or ""
    for item in items:
        if "contract" in item.keywords and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="needs an installed vLLM (uv run --extra cpu ...)"))
        if "e2e" in item.keywords:
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="needs an installed vLLM (uv run --extra cpu ...)"))
            elif not (config.getoption("--e2e") or "e2e" in asked_for):
                item.add_marker(pytest.mark.skip(reason="starts real engines: ask with --e2e"))
    # Fast tests first, engines last.
    items.sort(key=lambda item: ("e2e" in item.keywords, "contract" in item.keywords))
