# SPDX-License-Identifier: Apache-2.0
"""The recall task, and the engines of the e2e suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("e2e"))]


@pytest.fixture(scope="session")
def recall_engines(tmp_path_factory: pytest.TempPathFactory):
    """Engines with the recall models, each started when first asked for."""
    from recall_engines import RecallEngines

    return RecallEngines(tmp_path_factory.mktemp("recall"))
