# SPDX-License-Identifier: Apache-2.0
"""One set of engines per session, under the rank check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("DCP_HYBRID_CHECK_RANKS", "60")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines that start when first asked for and are remembered."""
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))
