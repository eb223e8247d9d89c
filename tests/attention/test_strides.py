# SPDX-License-Identifier: Apache-2.0
"""Strides of dimensions of size 1."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention.strides import with_packed_singletons  # noqa: E402


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_a_dimension_of_size_1_gets_the_stride_of_a_packed_tensor(dim: int) -> None:
    shape = [3, 4, 5, 8]
    shape[dim] = 1
    packed = torch.arange(torch.Size(shape).numel()).view(shape)
    strides = list(packed.stride())
    strides[dim] = 7
    mended = with_packed_singletons(packed.as_strided(shape, strides))
    assert mended.stride() == packed.stride()
    assert torch.equal(mended, packed)
    assert mended.data_ptr() == packed.data_ptr()


def test_other_strides_and_the_offset_are_kept() -> None:
    pages = torch.arange(6 * 2 * 16 * 8).view(6, 2, 16, 1, 8)
    values = pages.unbind(1)[1]
    odd = values.as_strided(values.shape, (*values.stride()[:2], 1, 1), values.storage_offset())
    mended = with_packed_singletons(odd)
    assert mended.stride() == (256, 8, 8, 1)
    assert torch.equal(mended, values)


def test_a_tensor_that_is_as_it_should_be_is_returned_itself() -> None:
    tensor = torch.zeros(3, 1, 8)
    assert with_packed_singletons(tensor) is tensor
    without_singletons = torch.zeros(3, 4, 8).transpose(0, 1)
    assert with_packed_singletons(without_singletons) is without_singletons
