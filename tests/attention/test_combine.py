# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  # imports follow the check for torch
"""Combination by LSE: three twins, one rule.

Run as a script, this file combines with the Triton kernels (see `triton_results`).

Bound of the float comparisons: twice the error, against the float64 twin, of the same combination done in plain tensor
operations, in float32 for the LSE and rounded to the dtype for the output.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention import combine as module
from vllm_dcp_hybrid.attention.combine import (
    add_sinks,
    combine,
    combine_naive,
    combine_torch,
    correct_partial,
    correct_partial_torch,
)

NOTHING = (-math.inf, math.nan, math.inf)
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (ranks, tokens, heads, head size, dtype, with sinks)
CASES = [(3, 5, 3, head_size, dtype, False) for head_size in HEAD_SIZES for dtype in DTYPES]
CASES += [(2, 3, 17, 128, torch.bfloat16, True), (4, 7, 4, 80, torch.float32, True)]
CASES += [(1, 4, 2, 64, torch.float32, False), (8, 2, 5, 256, torch.float16, False)]
CASES += [(2, 0, 4, 64, torch.float32, False), (2, 1, 1, 64, torch.bfloat16, False)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


def make_partials(case):
    """Partials with each kind of "nothing", whose outputs are NaN, here and there, and one row with nothing at all."""
    num_ranks, num_tokens, num_heads, head_size, dtype, has_sinks = case
    generator = torch.Generator().manual_seed(num_ranks * 1000 + num_tokens * 100 + num_heads * 10 + head_size)
    outs = torch.randn(num_ranks, num_tokens, num_heads, head_size, generator=generator).to(dtype)
    lses = torch.randn(num_ranks, num_tokens, num_heads, generator=generator) * 4 + 5
    is_empty = torch.rand(lses.shape, generator=generator) < 0.4
    if num_tokens > 1:
        is_empty[:, -1] = True
        lses[0, 0] = -300.0
    kinds = torch.tensor(NOTHING)[torch.randint(3, lses.shape, generator=generator)]
    lses = torch.where(is_empty, kinds, lses)
    outs[is_empty] = math.nan
    sinks = torch.randn(num_heads, generator=generator) * 4 if has_sinks else None
    return outs, lses, sinks


def plain_error(outs, lses, sinks, expected_out, expected_lse):
    """Largest errors of the textbook formula in float32, its output rounded to the dtype."""
    logits = lses.masked_fill(~lses.isfinite(), -math.inf)
    logits = logits if sinks is None else torch.cat([logits, sinks.expand(1, *logits.shape[1:])])
    lse = torch.logsumexp(logits, dim=0)
    weights = (logits[: len(outs)] - lse).exp().nan_to_num(0.0)
    out = (outs.float().nan_to_num(0.0) * weights.unsqueeze(-1)).sum(0).to(outs.dtype)
    is_live = expected_lse.isfinite()
    return max_error(out, expected_out), max_error(lse[is_live], expected_lse[is_live])


def max_error(actual, expected) -> float:
    return (actual.double() - expected).abs().max().item() if actual.numel() else 0.0


def assert_combined(actual, case) -> None:
    out, lse = actual
    outs, lses, sinks = make_partials(case)
    expected_out, expected_lse = combine_naive(outs, lses, sinks=sinks)
    assert out.dtype == outs.dtype
    assert lse.dtype == torch.float32
    assert out.shape == expected_out.shape
    assert not out.isnan().any()
    is_live = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), is_live)
    assert (lse[~is_live] == -math.inf).all()
    assert (out[~is_live] == 0).all()
    bound_out, bound_lse = plain_error(outs, lses, sinks, expected_out, expected_lse)
    # Where the plain computation happens to be exact, one rounding of the result is still allowed.
    eps = torch.finfo(outs.dtype).eps
    assert max_error(out, expected_out) <= max(2 * bound_out, eps)
    assert max_error(lse[is_live], expected_lse[is_live]) <= max(2 * bound_lse, 1e-6)


def own_share(correct_partial, outs, lses, rank):
    """The share of one rank's [T, H, D], as a single piece."""
    share, lse = correct_partial(outs[rank].unsqueeze(0), lses.unsqueeze(1), rank)
    return share[0], lse[0]


def assert_shares_sum_up(shares, case) -> None:
    """`shares`: (share, lse) of each rank."""
    outs, lses, _ = make_partials(case)
    expected_out, expected_lse = combine_naive(outs, lses)
    for share, lse in shares:
        assert share.dtype == outs.dtype
        assert not share.isnan().any()
        assert torch.equal(lse, shares[0][1])
    is_live = expected_lse.isfinite()
    assert (shares[0][1][~is_live] == -math.inf).all()
    assert max_error(shares[0][1][is_live], expected_lse[is_live]) <= 4e-6
    total = sum(share.double() for share, _ in shares)
    # Each share is rounded to the dtype: half an eps of at most the largest output, for each rank.
    largest = outs.nan_to_num(0.0).abs().max().item() if outs.numel() else 0.0
    assert max_error(total, expected_out) <= torch.finfo(outs.dtype).eps * largest * max(len(shares) / 2, 1)
    for rank, (share, _) in enumerate(shares):
        assert (share[~lses[rank].isfinite()] == 0).all()


@pytest.fixture(scope="module")
def triton_results(tmp_path_factory: pytest.TempPathFactory):
    """Results of all cases by the Triton kernels under their interpreter, chosen before the import of triton."""
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    root = str(Path(module.__file__).parents[2])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(path)],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


@each_case
def test_case_16_torch_combines_like_naive_whatever_empty_ranks_hold(case) -> None:
    """CASES 16: one rank's output NaN with LSE -inf, NaN or +inf, all ranks empty, all head sizes."""
    outs, lses, sinks = make_partials(case)
    assert_combined(combine_torch(outs, lses, sinks=sinks), case)


@each_case
def test_case_16_triton_combines_like_naive_whatever_empty_ranks_hold(triton_results, case) -> None:
    """CASES 16, through Triton's interpreter."""
    assert_combined(triton_results["combine", CASES.index(case)], case)


@each_case
def test_case_16_shares_by_torch_sum_up_to_the_combined_output(case) -> None:
    """CASES 16 for ag_rs, with the rank as a plain argument."""
    outs, lses, _ = make_partials(case)
    assert_shares_sum_up([own_share(correct_partial_torch, outs, lses, rank) for rank in range(len(outs))], case)


@each_case
def test_case_16_shares_by_triton_sum_up_to_the_combined_output(triton_results, case) -> None:
    """CASES 16 for ag_rs, through Triton's interpreter."""
    assert_shares_sum_up(triton_results["shares", CASES.index(case)], case)


def test_triton_reads_and_writes_through_strides_into_another_dtype(triton_results) -> None:
    outs, lses, _ = make_partials(CASES[0])
    expected_out, expected_lse = combine_torch(outs, lses)
    (out, lse), poison = triton_results["strided_combine"]
    torch.testing.assert_close(out, expected_out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert poison.isnan().all()
    (share, lse), poison = triton_results["strided_share"]
    expected_share, expected_lse = correct_partial_torch(
        outs[1:2].expand(2, -1, -1, -1), lses.unsqueeze(1).expand(-1, 2, -1, -1), 1
    )
    torch.testing.assert_close(share, expected_share, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert poison.isnan().all()


@pytest.mark.parametrize("nothing", NOTHING)
def test_case_16_all_ranks_empty_gives_zeros_and_minus_infinity(nothing: float) -> None:
    """CASES 16."""
    outs, lses = torch.full((2, 3, 4, 64), math.nan), torch.full((2, 3, 4), nothing)
    for out, lse in (combine_naive(outs, lses), combine_torch(outs, lses)):
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    share, lse = own_share(correct_partial_torch, outs, lses, 0)
    assert (share == 0).all()
    assert (lse == -math.inf).all()


def test_case_18_padded_rows_are_zeros_and_leave_live_rows_alone() -> None:
    """CASES 18."""
    generator = torch.Generator().manual_seed(1)
    outs, lses = torch.randn(4, 6, 2, 64, generator=generator), torch.randn(4, 6, 2, generator=generator)
    alone, alone_lse = combine_torch(outs[:, :4], lses[:, :4])
    outs[:, 4:], lses[:, 4:] = math.nan, math.inf
    padded, padded_lse = combine_torch(outs, lses)
    assert torch.equal(padded[:4], alone)
    assert torch.equal(padded_lse[:4], alone_lse)
    assert (padded[4:] == 0).all()


def attend(q, k, v):
    """One query [H, D] over the keys [L, H, D] in float64: output, LSE; NaN and NaN where there is no key."""
    if k.shape[0] == 0:
        return torch.full_like(q, math.nan), torch.full(q.shape[:1], math.nan, dtype=q.dtype)
    scores = torch.einsum("hd,lhd->hl", q, k)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v), torch.logsumexp(scores, -1)


@pytest.mark.parametrize("interleave_size", [1, 16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_case_15_attention_over_shards_is_attention_over_all_tokens(num_ranks: int, interleave_size: int) -> None:
    """CASES 15 and 17: lengths from 1 to N + 1, so that ranks are empty, beside 5 blocks; the LSE is in natural log."""
    generator = torch.Generator().manual_seed(2)
    lengths = [*range(1, num_ranks + 2), 15, 16, 17, 5 * 16 * num_ranks]
    whole, partials = [], []
    for length in lengths:
        q = torch.randn(3, 64, generator=generator, dtype=torch.float64) / 4
        k, v = torch.randn(2, length, 3, 64, generator=generator, dtype=torch.float64)
        owner = torch.arange(length) // interleave_size % num_ranks
        whole.append(attend(q, k, v))
        partials.append([attend(q, k[owner == rank], v[owner == rank]) for rank in range(num_ranks)])
    outs = torch.stack([torch.stack([row[rank][0] for row in partials]) for rank in range(num_ranks)])
    lses = torch.stack([torch.stack([row[rank][1] for row in partials]) for rank in range(num_ranks)])
    assert lses.isnan().any() == (num_ranks > 1)
    for out, lse in (combine_naive(outs, lses), combine_torch(outs.float(), lses.float())):
        torch.testing.assert_close(out.double(), torch.stack([o for o, _ in whole]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), torch.stack([s for _, s in whole]), rtol=1e-5, atol=1e-6)


def test_case_17_equal_ranks_average_and_add_ln_of_their_number() -> None:
    """CASES 17: log base e. In base 2 the LSE would grow by 2 here."""
    outs, lses = torch.ones(4, 1, 1, 64) * torch.arange(4.0).view(4, 1, 1, 1), torch.full((4, 1, 1), 3.0)
    out, lse = combine_torch(outs, lses)
    assert torch.allclose(out, torch.full((1, 1, 64), 1.5))
    assert math.isclose(lse.item(), 3.0 + math.log(4), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_case_17_low_precision_inputs_are_combined_in_float32(dtype: torch.dtype) -> None:
    """CASES 17: the result is the float32 result, rounded once."""
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(8, 16, 4, 64, generator=generator).to(dtype)
    lses = torch.randn(8, 16, 4, generator=generator)
    in_float32, _ = combine_torch(outs.float(), lses)
    assert torch.equal(combine_torch(outs, lses)[0], in_float32.to(dtype))


def test_large_lses_neither_overflow_nor_vanish() -> None:
    outs = torch.stack([torch.ones(1, 1, 64), 3 * torch.ones(1, 1, 64)])
    for offset in (-1e4, -100.0, 100.0, 1e4):
        out, lse = combine_torch(outs, torch.full((2, 1, 1), offset))
        assert torch.allclose(out, torch.full((1, 1, 64), 2.0))
        assert math.isclose(lse.item(), offset + math.log(2), rel_tol=1e-6)


def test_sinks_count_once_in_the_denominator_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((2, 64), (9, 2, 64), (9, 2, 64))
    )
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    scores = torch.cat([torch.einsum("hd,lhd->hl", q, k), sinks.unsqueeze(1)], dim=1)
    expected = torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, :-1], v)
    parts = [attend(q, k[rank::3], v[rank::3]) for rank in range(3)]
    outs, lses = (torch.stack(part).unsqueeze(1).float() for part in zip(*parts, strict=True))
    out, lse = combine_torch(outs, lses, sinks=sinks)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[0].double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-6)


def test_sinks_added_afterwards_equal_sinks_combined_in_and_survive_empty_rows() -> None:
    case = (3, 6, 4, 64, torch.float32, True)
    outs, lses, sinks = make_partials(case)
    sinks[0] = -math.inf
    expected_out, expected_lse = combine_torch(outs, lses, sinks=sinks)
    out, lse = add_sinks(*combine_torch(outs, lses), sinks)
    torch.testing.assert_close(out, expected_out, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=1e-6)
    assert torch.equal(expected_lse[-1], sinks)


def test_inputs_are_left_alone_and_into_is_filled_in_its_dtype() -> None:
    outs, lses, _ = make_partials(CASES[1])
    before = outs.clone(), lses.clone()
    into = torch.full((3, 5, 64), math.nan).transpose(0, 1)
    assert combine_torch(outs, lses, into=into)[0] is into
    assert torch.equal(into.to(outs.dtype), combine_torch(outs, lses)[0])
    piece, lses_of_piece, into = outs[:1], lses.unsqueeze(1), into.unsqueeze(0)
    assert correct_partial_torch(piece, lses_of_piece, 0, into=into)[0] is into
    assert torch.equal(into.to(outs.dtype), correct_partial_torch(piece, lses_of_piece, 0)[0])
    for tensor, copy in zip((outs, lses), before, strict=True):
        assert torch.equal(tensor, copy) or torch.equal(tensor.nan_to_num(9.0), copy.nan_to_num(9.0))


def test_the_device_chooses_the_twin() -> None:
    outs, lses, sinks = make_partials((2, 3, 4, 64, torch.float32, True))
    assert torch.equal(combine(outs, lses, sinks=sinks)[0], combine_torch(outs, lses, sinks=sinks)[0])
    ours, torchs = (own_share(function, outs, lses, 1) for function in (correct_partial, correct_partial_torch))
    assert torch.equal(ours[0], torchs[0])


def write_triton_results(path: Path) -> None:
    from vllm_dcp_hybrid.attention.combine_triton import combine_triton, correct_partial_triton

    results = {}
    for number, case in enumerate(CASES):
        outs, lses, sinks = make_partials(case)
        num_ranks = len(outs)
        # Triton 3.6's interpreter truncates to bfloat16, where a GPU rounds to nearest: let torch round.
        into = torch.empty(outs.shape[1:]) if outs.dtype is torch.bfloat16 else None
        out, lse = combine_triton(outs, lses, sinks=sinks, into=into)
        results["combine", number] = out.to(outs.dtype), lse
        assert combine_triton(outs, lses, sinks=sinks)[0].dtype is outs.dtype
        results["shares", number] = [own_share(correct_partial_triton, outs, lses, rank) for rank in range(num_ranks)]

    outs, lses, _ = make_partials(CASES[0])
    num_ranks, num_tokens, num_heads, head_size = outs.shape
    by_head = outs.new_full((num_ranks, num_heads, num_tokens, head_size + 16), math.nan)
    by_head[..., :head_size] = outs.transpose(1, 2)
    strided_outs = by_head[..., :head_size].transpose(1, 2)
    strided_lses = lses.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((num_heads, num_tokens, head_size + 16), math.nan)
    into = wide[..., :head_size].transpose(0, 1)
    results["strided_combine"] = combine_triton(strided_outs, strided_lses, into=into), wide[..., head_size:]
    # Two pieces with the same LSEs, as a collective that sent all of them would leave them.
    wide = torch.full((num_heads, 2, num_tokens, head_size + 16), math.nan)
    into = wide[..., :head_size].permute(1, 2, 0, 3)
    lses_of_pieces = strided_lses.unsqueeze(1).expand(-1, 2, -1, -1)
    share = correct_partial_triton(strided_outs[1:2].expand(2, -1, -1, -1), lses_of_pieces, 1, into=into)
    results["strided_share"] = share, wide[..., head_size:]
    torch.save(results, path)


if __name__ == "__main__":
    write_triton_results(Path(sys.argv[1]))
