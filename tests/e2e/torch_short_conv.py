# SPDX-License-Identifier: Apache-2.0
"""Short convolutions on CPUs for vLLM < 0.25, which has them in Triton only: a worker that brings them in torch.

Nothing else of the engine is replaced, but 0.20 gets equal pages for its oracle.  From 0.25 on stock's own are used.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from packaging.version import Version
from vllm import __version__
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.mamba import short_conv
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

STOCK_ALIGNS_PAGES = Version(__version__) >= Version("0.21")


def convolve_sequences(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The part of ``causal_conv1d_fn`` that short convolutions use.

    Args:
        x: ``[dim, num_tokens]``, sequences one after the other.
        weight: ``[dim, width]``.
        conv_states: ``[num_blocks, dim, width - 1]``, the last inputs of each sequence, updated in place.
        query_start_loc: ``[num_seqs + 1]``.
        cache_indices: ``[num_seqs]`` blocks.
        has_initial_state: ``[num_seqs]``.
    """
    out = torch.empty_like(x)
    width = weight.shape[1]
    for row, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        state = conv_states[int(cache_indices[row])]
        before = state if has_initial_state[row] else torch.zeros_like(state)
        inputs = torch.cat((before, x[:, begin:end]), dim=1)
        out[:, begin:end] = torch.nn.functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight))
        state.copy_(inputs[:, 1 - width :].clone())
    return out


def convolve_tokens(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """The part of ``causal_conv1d_update`` that short convolutions use: one token ``x[row]`` for each sequence."""
    num_seqs = len(x)
    return convolve_sequences(
        x.t(),
        weight,
        bias,
        conv_states=conv_states,
        query_start_loc=torch.arange(num_seqs + 1),
        cache_indices=conv_state_indices,
        has_initial_state=torch.ones(num_seqs, dtype=torch.bool),
    ).t()


_dispatch_cpu_gemm = utils.dispatch_cpu_unquantized_gemm


def dispatch_cpu_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stock's choice of a matrix product, for what is one: convolutions keep their weights as they are."""
    if layer.weight.ndim == 2:
        _dispatch_cpu_gemm(layer, remove_weight)


class TorchShortConvWorker(CPUWorker):
    """Stock's CPU worker, with short convolutions in torch."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_gemm
        short_conv.causal_conv1d_fn = convolve_sequences
        short_conv.causal_conv1d_update = convolve_tokens
        super().load_model(*args, **kwargs)
        if not STOCK_ALIGNS_PAGES and self.parallel_config.decode_context_parallel_size == 1:
            # With DCP the plugin does it.
            backend = current_platform._find_non_ssm_backend(self.vllm_config)
            current_platform._align_hybrid_block_size(self.vllm_config, backend)
