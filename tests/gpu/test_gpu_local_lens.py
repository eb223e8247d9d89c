# SPDX-License-Identifier: Apache-2.0
"""Key counts per row on the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("n", "interleave_size"), [(1, 1), (2, 1), (2, 16), (4, 3), (8, 64)])
def test_kernel_equals_the_naive_twin(n: int, interleave_size: int) -> None:
    from vllm_dcp_hybrid.attention.local_lens import fill_local_lens_triton, local_lens_naive

    seq_lens = [1, 9, 17, 131_072, 300, 5, 0]
    query_lens = [1, 1, 1, 1, 257, 5, 0]
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32).cuda()
    for rank in range(n):
        into = torch.full((600,), -7, dtype=torch.int32, device="cuda")
        fill_local_lens_triton(
            torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
            starts,
            4,
            into,
            n=n,
            rank=rank,
            interleave_size=interleave_size,
        )
        expected = local_lens_naive(seq_lens, query_lens, 4, n=n, rank=rank, interleave_size=interleave_size)
        assert into.tolist() == expected + [0] * (600 - len(seq_lens))
