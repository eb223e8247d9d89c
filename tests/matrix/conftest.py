# SPDX-License-Identifier: Apache-2.0
"""The matrix tested without a release: its modules lie beside the tests and beside the engines."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]
