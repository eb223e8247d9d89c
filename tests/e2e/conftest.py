# SPDX-License-Identifier: Apache-2.0
"""One set of engines per session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines that start when first asked for and are remembered."""
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))
