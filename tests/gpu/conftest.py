# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("e2e")), str(HERE.with_name("benchmarks"))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    torch = None
    try:
        import torch
    except ModuleNotFoundError:
        reason = "needs torch and a CUDA device"
    else:
        reason = "needs a CUDA device"
    num_devices = 0 if torch is None else torch.cuda.device_count()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if not num_devices:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "multi_gpu" in item.keywords and num_devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines that start when first asked for and are remembered."""
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))
