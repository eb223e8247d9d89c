# SPDX-License-Identifier: Apache-2.0
"""One set of engines per session, under the rank check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines that start when first asked for and are remembered."""
    from engines import Engines

    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module", autouse=True)
def rank_check() -> Iterator[None]:
    """Engines that start here compare what their ranks do; the tests of other directories do not know of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCP_HYBRID_CHECK_RANKS", os.environ.get("DCP_HYBRID_CHECK_RANKS", "60"))
        yield
