# SPDX-License-Identifier: Apache-2.0
"""Combination of the partial attention outputs of the DCP ranks, by their log-sum-exp (LSE).

Rank r attends over the tokens K_r that it stores, and reports, per token and head with scores s_k,

    out_r = sum_k exp(s_k) v_k / exp(lse_r)        lse_r = ln sum_k exp(s_k)        k in K_r

so that attention over all tokens is

    lse = ln sum_r exp(lse_r)        out = sum_r exp(lse_r - lse) out_r

Rules:
- The LSE is float32 and in natural log. All arithmetic is float32, and each result is rounded to its dtype once.
- An LSE of -inf, +inf or NaN says "this rank has nothing here" (kernels differ in what they write for no tokens). Its
  weight is 0 and its output, which may be NaN, never reaches the sum. Where no rank has anything: zeros, and -inf.
- An attention sink is a logit without a value: it counts once, in the denominator of the whole.

The twins: `combine_naive` states the rule, `combine_torch` and `correct_partial_torch` run on any device,
`combine_triton` and `correct_partial_triton` (in `combine_triton.py`) are one kernel each; `combine` and
`correct_partial` choose by device.
"""

from __future__ import annotations

import math

import torch


def combine_naive(
    outs: torch.Tensor, lses: torch.Tensor, *, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule, one token and head at a time, in float64.

    Args:
        outs: [N, T, H, D] partial outputs, rank by rank.
        lses: [N, T, H] their LSEs, natural log.
        sinks: [H] attention sink logits.

    Returns:
        out [T, H, D] float64, lse [T, H] float64. With sinks the LSE counts them in.
    """
    num_ranks, num_tokens, num_heads, head_size = outs.shape
    out = torch.zeros(num_tokens, num_heads, head_size, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(num_heads):
            lse_of_rank = {rank: float(lses[rank, token, head]) for rank in range(num_ranks)}
            lse_of_rank = {rank: value for rank, value in lse_of_rank.items() if math.isfinite(value)}
            logits = list(lse_of_rank.values())
            if sinks is not None and math.isfinite(sinks[head]):
                logits.append(float(sinks[head]))
            if not logits:
                continue
            peak = max(logits)
            global_lse = peak + math.log(sum(math.exp(value - peak) for value in logits))
            lse[token, head] = global_lse
            for rank, value in lse_of_rank.items():
                weight = math.exp(value - global_lse)
                if weight > 0:
                    out[token, head] += weight * outs[rank, token, head].double()
    return out, lse


def combine_torch(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`combine_naive` in float32 tensor operations; extra memory is that of one float32 [T, H, D] or two.

    Args:
        outs: [N, T, H, D] partial outputs, any strides.
        lses: [N, T, H] their LSEs, natural log, any strides.
        sinks: [H] attention sink logits.
        into: [T, H, D] where to write the output, any strides and dtype; overlaps no input. Default: a new tensor.

    Returns:
        out [T, H, D] in the dtype of `outs` (or `into` itself), lse [T, H] float32. With sinks the LSE counts them in,
        so that a further merge by LSE stays right; it is then the sink where no rank has anything.

    Invariant: no NaN where each rank's output is finite or its LSE is not.
    """
    weights, lse = _weigh_ranks(lses, sinks)
    total = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for out, weight in zip(outs, weights, strict=True):
        total += _scale(out, weight)
    if into is None:
        return total.to(outs.dtype), lse
    return into.copy_(total), lse


def correct_partial_torch(
    outs: torch.Tensor, lses: torch.Tensor, dcp_rank: int, *, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's shares of the combined outputs; the sum of the shares over the ranks is the combined output.

    Args:
        outs: [M, T, H, D] this rank's partial outputs, in M pieces (one for each receiver).
        lses: [N, M, T, H] the LSEs of all ranks, natural log.
        dcp_rank: which of the N is this one.
        into: [M, T, H, D] where to write the shares, any strides and dtype; overlaps no input. Default: a new tensor.

    Returns:
        shares [M, T, H, D] in the dtype of `outs` (or `into` itself), lse [M, T, H] float32, the same on each rank.

    Invariant: a share is 0 wherever the rank's weight is 0, whatever its output is.
    """
    weights, lse = _weigh_ranks(lses, None)
    shares = _scale(outs, weights[dcp_rank])
    if into is None:
        return shares.to(outs.dtype), lse
    return into.copy_(shares), lse


def combine(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`combine_triton` on CUDA, `combine_torch` elsewhere, unless `use_triton` decides."""
    if outs.is_cuda if use_triton is None else use_triton:
        from vllm_dcp_hybrid.attention.combine_triton import combine_triton

        return combine_triton(outs, lses, sinks=sinks, into=into)
    return combine_torch(outs, lses, sinks=sinks, into=into)


def correct_partial(
    outs: torch.Tensor,
    lses: torch.Tensor,
    dcp_rank: int,
    *,
    into: torch.Tensor | None = None,
    use_triton: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`correct_partial_triton` on CUDA, `correct_partial_torch` elsewhere, unless `use_triton` decides."""
    if outs.is_cuda if use_triton is None else use_triton:
        from vllm_dcp_hybrid.attention.combine_triton import correct_partial_triton

        return correct_partial_triton(outs, lses, dcp_rank, into=into)
    return correct_partial_torch(outs, lses, dcp_rank, into=into)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count attention sinks into an output that was combined without them.

    Args:
        out: [T, H, D] combined output; rounding is least in float32.
        lse: [T, H] float32, natural log, -inf where nothing was attended to.
        sinks: [H] attention sink logits.

    Returns:
        out [T, H, D] in its dtype, lse [T, H] float32 with the sinks.

    Invariant: equal to `combine_torch(..., sinks=sinks)` but for rounding.
    """
    sinks = _mark_empty(sinks.float())
    with_sinks = torch.logaddexp(lse, sinks)
    # Both -inf leave nothing to scale: NaN would be the difference.
    weight = torch.where(lse.isfinite(), (lse - with_sinks).exp(), 0.0)
    return _scale(out, weight).to(out.dtype), with_sinks


def _mark_empty(lses: torch.Tensor) -> torch.Tensor:
    return torch.where(lses.isfinite(), lses, -math.inf)


def _weigh_ranks(lses: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, ..., H] and global LSE [..., H] of LSEs [N, ..., H] and sinks [H], all float32."""
    lses = _mark_empty(lses.float())
    peak = lses.amax(dim=0)
    if sinks is not None:
        sinks = _mark_empty(sinks.float())
        peak = torch.maximum(peak, sinks)
    # A finite peak keeps -inf - peak at -inf: nothing then weighs exp(-inf) = 0.
    peak = torch.where(peak.isfinite(), peak, 0.0)
    weights = (lses - peak).exp()
    total = weights.sum(dim=0)
    if sinks is not None:
        total = total + (sinks - peak).exp()
    return weights / torch.where(total > 0, total, 1.0), total.log() + peak


def _scale(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`out` [..., D] times `weight` [...] in float32, and 0 where the weight is 0, also if `out` is NaN there."""
    weight = weight.unsqueeze(-1)
    return torch.where(weight > 0, out.float() * weight, 0.0)
