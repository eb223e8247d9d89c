# SPDX-License-Identifier: Apache-2.0
"""Faults to plant: each edit still has its place, and leaves Python behind."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from planted_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_each_fault_has_one_place_and_tests_that_exist(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text("utf-8")
    assert text.count(fault.before) == 1
    ast.parse(text.replace(fault.before, fault.after))
    assert all((ROOT / test).exists() for test in fault.tests)
