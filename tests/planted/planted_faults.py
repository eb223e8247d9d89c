# SPDX-License-Identifier: Apache-2.0
"""Faults that others shipped, as one edit of this package each, and where the suite should notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One edit.

    Attributes:
        name: of the fault.
        case: of CASES.md, or what it is like there.
        file: of this repository.
        before, after: the text that is replaced, which occurs once.
        tests: directories and files whose tests are asked.
        engines: of tests/e2e, asked where engines are wanted.
    """

    name: str
    case: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    engines: str = "lfm2"


_RULES = ("tests/test_placement.py", "tests/test_geometry.py", "tests/test_any_geometry.py")

FAULTS = (
    Fault(
        "recurrent block scaled by N",
        "1",
        "vllm_dcp_hybrid/geometry.py",
        "return self.dcp_world_size if self.is_sharded else 1",
        "return self.dcp_world_size",
        (*_RULES, "tests/core", "tests/worker"),
    ),
    Fault(
        "LSE 0 on empty ranks",
        "15",
        "vllm_dcp_hybrid/attention/cpu.py",
        'partial_lse = torch.full(queries.shape[:2], float("-inf"), dtype=torch.float32)',
        "partial_lse = torch.zeros(queries.shape[:2], dtype=torch.float32)",
        ("tests/attention",),
    ),
    Fault(
        "owner rule off by one interleave",
        "4",
        "vllm_dcp_hybrid/worker/slot_mapping.py",
        "    runs = offsets // interleave_size\n",
        "    runs = offsets // interleave_size + 1\n",
        ("tests/worker", "tests/test_any_geometry.py"),
    ),
    Fault(
        "state ahead of its block",
        "10",
        "vllm_dcp_hybrid/core/prefill_split.py",
        "return boundary - start if start < boundary else chunk",
        "return chunk",
        ("tests/core",),
    ),
    Fault(
        "exchange skipped by local lengths",
        "21",
        "vllm_dcp_hybrid/attention/plan.py",
        "return bool(self.decode_rows or self.context_rows)",
        "return any(row.local_kv_len for row in self.exchange_rows)",
        ("tests/attention", "tests/test_any_geometry.py"),
    ),
)
