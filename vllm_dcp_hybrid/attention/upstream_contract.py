# SPDX-License-Identifier: Apache-2.0
"""Functions that vLLM 0.26 has in ``vllm.v1.worker.cp_utils``, by the same names, for older releases.

They answer questions that this package asks of its plan (:mod:`vllm_dcp_hybrid.attention.plan`), in upstream's terms,
so that code and tests written for 0.26 run against the plugin.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def should_skip_dcp_context_attention(context_kv_lens_cpu: torch.Tensor) -> bool:
    """Whether no row of the batch has context, on any rank.

    Args:
        context_kv_lens_cpu: ``[num_reqs]``, *global* tokens before each row's new ones.  Local lengths would let ranks
            disagree, and the ranks that do not skip would wait in a collective for ever.
    """
    return context_kv_lens_cpu.numel() == 0 or not bool(context_kv_lens_cpu.any())


def split_dcp_context_queries(
    query_start_loc: torch.Tensor,
    seq_lens_cpu_upper_bound: torch.Tensor | None,
    max_query_len: int,
    num_actual_tokens: int,
) -> tuple[int, int, int, int]:
    """Sizes of the decode and extend regions of a batch that is ordered decode, extend, pure prefill.

    Args:
        query_start_loc: ``[num_reqs + 1]`` on the host.
        seq_lens_cpu_upper_bound: ``[num_reqs]`` global lengths on the host; None where they are not known, which makes
            every row an extend row.
        max_query_len: longest row, tokens.
        num_actual_tokens: tokens of the batch, padding included.

    Returns:
        (decode rows, extend rows, decode tokens, extend tokens).
    """
    num_reqs = query_start_loc.numel() - 1
    if max_query_len < 2:
        return num_reqs, 0, num_actual_tokens, 0
    if seq_lens_cpu_upper_bound is None:
        return 0, num_reqs, 0, num_actual_tokens
    starts = query_start_loc.tolist()
    query_lens = [after - before for before, after in pairwise(starts)]
    num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), num_reqs)
    seq_lens = seq_lens_cpu_upper_bound[:num_reqs].tolist()
    # A row of one token is never one, out of order as well.
    pure_prefills = (row for row in range(num_decodes, num_reqs) if seq_lens[row] <= query_lens[row] > 1)
    end_of_extends = next(pure_prefills, num_reqs)
    num_decode_tokens = starts[num_decodes]
    # Without a pure prefill behind them, extends reach to the end of the batch, padding included.
    end_token = num_actual_tokens if num_decodes < end_of_extends == num_reqs else starts[end_of_extends]
    return num_decodes, end_of_extends - num_decodes, num_decode_tokens, end_token - num_decode_tokens


def should_split_fa2_dcp_context_attention(
    fa_version: int | None,
    max_query_len: int,
    num_reqs: int,
    num_decode_reqs: int,
    num_context_prefill_reqs: int,
) -> bool:
    """Whether FlashAttention 2 needs one call per kind of row: it cannot mix three kinds in one paged call.

    Args:
        num_reqs: all rows; those that are neither decode nor context prefill are pure prefill.
    """
    if fa_version != 2 or max_query_len < 2:
        return False
    num_pure_prefills = num_reqs - num_decode_reqs - num_context_prefill_reqs
    return num_decode_reqs < num_reqs and (num_decode_reqs > 0 or num_pure_prefills > 0)


def get_dcp_dummy_context_len(
    dcp_world_size: int,
    cp_kv_cache_interleave_size: int,
    has_kv_cache_config: bool,
    create_mixed_batch: bool,
    is_graph_capturing: bool,
    uniform_decode: bool,
) -> int:
    """Context tokens that a dummy run needs so that every rank's context attention is part of it; 0 for none.

    One interleave round gives each rank something.  Runs before the KV cache exists have nothing to point at, and
    runs that are neither mixed nor a captured uniform decode never reach context attention.
    """
    reaches_context = create_mixed_batch or (is_graph_capturing and uniform_decode)
    if dcp_world_size < 2 or not has_kv_cache_config or not reaches_context:
        return 0
    return dcp_world_size * cp_kv_cache_interleave_size
