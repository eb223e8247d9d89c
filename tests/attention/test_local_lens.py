# SPDX-License-Identifier: Apache-2.0
"""Key counts per row: the torch twin against the naive one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention.local_lens import fill_local_lens_torch, local_lens_naive  # noqa: E402


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 300)), max_size=8),
    num_decodes=st.integers(0, 8),
    n=st.integers(1, 8),
    interleave_size=st.integers(1, 64),
)
def test_torch_twin_equals_the_naive_one(
    rows: list[tuple[int, int]], num_decodes: int, n: int, interleave_size: int
) -> None:
    query_lens = [new for _, new in rows]
    seq_lens = [context + new for context, new in rows]
    num_decodes = min(num_decodes, len(rows))
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    for rank in range(n):
        into = torch.full((12,), -7, dtype=torch.int32)
        arguments = {"n": n, "rank": rank, "interleave_size": interleave_size}
        fill_local_lens_torch(torch.tensor(seq_lens, dtype=torch.int32), starts, num_decodes, into, **arguments)
        expected = local_lens_naive(seq_lens, query_lens, num_decodes, **arguments)
        assert into.tolist() == expected + [0] * (12 - len(rows))
