# SPDX-License-Identifier: Apache-2.0
"""The CUDA engine: FlashAttention over sharded KV, as a backend in vLLM's registry under the name FLASH_ATTN.

A step of decode rows is one FlashAttention call over this rank's tokens, the new ones included, and one exchange: the
new token's KV is in the cache of its owner before attention runs (stock calls FlashAttention twice and merges).  That
is also the only thing that CUDA graphs capture.  With FlashAttention 3 such a step copies nothing: see ``fa3.py``.
Mixed steps run outside of graphs, row kinds apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm import _custom_ops
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from vllm_dcp_hybrid import activation, placement
from vllm_dcp_hybrid.attention import exchange, fa3
from vllm_dcp_hybrid.attention.local_lens import fill_local_lens_triton
from vllm_dcp_hybrid.attention.strides import with_packed_singletons
from vllm_dcp_hybrid.attention.upstream_contract import should_split_fa2_dcp_context_attention
from vllm_dcp_hybrid.core import kv_cache_specs
from vllm_dcp_hybrid.placement import Placement


@dataclass(frozen=True)
class StepRows:
    """The rows of a step by kind, from global lengths on the host: equal on all ranks.

    Rows come in vLLM's order for hybrids: one new token, several with context, no context.

    Attributes:
        num_decodes: leading rows of one new token.
        num_exchange_reqs: leading rows whose queries the ranks exchange: decode rows, and rows up to the last one that
            has context.
        num_decode_tokens, num_exchange_tokens, num_tokens: the same in tokens; the last without padding.
        max_new_len: longest row that is no decode row, tokens.
    """

    num_decodes: int
    num_exchange_reqs: int
    num_decode_tokens: int
    num_exchange_tokens: int
    num_tokens: int
    max_new_len: int

    @property
    def is_decode_only(self) -> bool:
        """Whether one call and one exchange are the whole step."""
        return self.num_decode_tokens == self.num_tokens


def sort_rows(query_start_loc: list[int], seq_lens: list[int]) -> StepRows:
    """Find the kinds in a step's rows.

    Args:
        query_start_loc: ``[num_reqs + 1]``.
        seq_lens: ``[num_reqs]``, global lengths with the new tokens, or upper bounds that are exact for rows of
            several tokens.
    """
    query_lens = [end - begin for begin, end in pairwise(query_start_loc)]
    num_reqs = len(query_lens)
    num_decodes = next((row for row, length in enumerate(query_lens) if length > 1), num_reqs)
    with_context = [row for row in range(num_decodes, num_reqs) if seq_lens[row] > query_lens[row]]
    num_exchange_reqs = with_context[-1] + 1 if with_context else num_decodes
    return StepRows(
        num_decodes=num_decodes,
        num_exchange_reqs=num_exchange_reqs,
        num_decode_tokens=query_start_loc[num_decodes],
        num_exchange_tokens=query_start_loc[num_exchange_reqs],
        num_tokens=query_start_loc[num_reqs],
        max_new_len=max(query_lens[num_decodes:], default=0),
    )


@dataclass
class DCPFlashAttentionMetadata(FlashAttentionMetadata):
    """Stock's metadata, whose ``seq_lens`` are this rank's, and the step's rows."""

    rows: StepRows | None = None
    new_query_start_loc: torch.Tensor | None = None
    """``[num_reqs - num_decodes + 1]`` int32: first tokens of the rows after the decode rows, counted from there."""


class DCPFlashAttentionBackend(FlashAttentionBackend):
    """FLASH_ATTN for hybrid models under DCP."""

    @staticmethod
    def get_impl_cls() -> type[DCPFlashAttentionImpl]:
        return DCPFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DCPFlashAttentionMetadataBuilder]:
        return DCPFlashAttentionMetadataBuilder


class DCPFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Lets stock's builder prepare plain attention over this rank's tokens.

    The only schedule is that of FlashAttention 3 for decode steps, whose rows have the ranks as query positions.
    """

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs hold decode steps only, so that no branch of a mixed step can be frozen into one."""
        if kv_cache_specs.place(kv_cache_spec) is Placement.SHARDED:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.is_sharded = kv_cache_specs.place(kv_cache_spec) is Placement.SHARDED
        self.num_ranks = get_dcp_group().world_size
        self.rank = get_dcp_group().rank_in_group
        self.interleave_size = activation.interleave_size(vllm_config)
        if self.is_sharded:
            # From here on stock's builder sees one rank, for whose heads it plans.
            self.dcp_world_size = 1
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        max_num_reqs = max(max_num_reqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        # Captured graphs read it: its address stays, and every step refreshes all of it.
        self.local_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        # First queries of rows that have one for each rank, padded rows too.
        self.decode_start_loc = self.num_ranks * torch.arange(max_num_reqs + 1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """The step's metadata, without a device-to-host copy: kinds are found on the host, counts on the device."""
        if not self.is_sharded:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        if common.max_query_len <= 1:
            rows = StepRows(num_reqs, num_reqs, starts[-1], starts[-1], starts[-1], 0)
        else:
            rows = sort_rows(starts, common.seq_lens_cpu_upper_bound[:num_reqs].tolist())
        fill_local_lens_triton(
            common.seq_lens[:num_reqs],
            common.query_start_loc,
            rows.num_decodes,
            self.local_lens,
            n=self.num_ranks,
            rank=self.rank,
            interleave_size=self.interleave_size,
        )
        per_rank = common.replace(
            seq_lens=self.local_lens[:num_reqs],
            max_seq_len=placement.cdiv(common.max_seq_len, self.num_ranks * self.interleave_size)
            * self.interleave_size,
            causal=False,
        )
        if rows.is_decode_only:
            starts_of_ranks = self.decode_start_loc[: num_reqs + 1]
            per_rank = per_rank.replace(query_start_loc=starts_of_ranks, max_query_len=self.num_ranks)
        # The schedule is made for all rows at once, which is what decode steps run; mixed steps do without.
        stock = super().build(0, per_rank, fast_build or not rows.is_decode_only)
        stock.query_start_loc, stock.max_query_len = common.query_start_loc, common.max_query_len
        new_query_start_loc = None
        if not rows.is_decode_only:
            new_query_start_loc = common.query_start_loc[rows.num_decodes : num_reqs + 1] - rows.num_decode_tokens
        return DCPFlashAttentionMetadata(**vars(stock), rows=rows, new_query_start_loc=new_query_start_loc)


class DCPFlashAttentionImpl(FlashAttentionImpl):
    """Attention of one layer over this rank's shard of the KV."""

    kv_dim: ClassVar[int] = 1
    """The dimension of the cache that has keys at index 0 and values at index 1."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.exchange = exchange.exchange_by_name(vllm_config.parallel_config.dcp_comm_backend)
        self.max_num_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        # New tokens attend to each other in the model's dtype; only queries that read an FP8 cache are quantised, here.
        self.is_fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        self.supports_quant_query_input = False

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention for the step's tokens.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, this rank's heads.
            key, value: ``[num_tokens, num_kv_heads, head_size]``, the new tokens, on every rank.
            kv_cache: ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, or as `kv_dim` says, this rank's shard,
                the new tokens that it owns already written.
            output: ``[num_tokens, num_heads, head_size]``, written in place.
        """
        if attn_metadata is None and self.attn_type == AttentionType.DECODER:
            self._show_memory_to_the_profiler(query)
        if not isinstance(attn_metadata, DCPFlashAttentionMetadata):
            result: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return result
        rows = attn_metadata.rows
        assert rows is not None
        lse = None
        if rows.num_exchange_tokens:
            queries, descales = self._gather_queries(layer, query[: rows.num_exchange_tokens])
            # Padded rows have no token; captured graphs have none of them.
            is_token_per_row = rows.is_decode_only and rows.num_tokens == attn_metadata.seq_lens.shape[0]
            is_fa3_step = is_token_per_row and self.vllm_flash_attn_version == 3
            attend = self._attend_decode_rows if is_fa3_step else self._attend_any_rows
            partials = attend(queries, self._caches(kv_cache), query.dtype, attn_metadata, descales)
            _, lse = self.exchange(*partials, get_dcp_group(), into=output[: rows.num_exchange_tokens])
        if not rows.is_decode_only:
            self._attend_new_tokens(query, key, value, attn_metadata, output, lse)
        return output

    def _gather_queries(self, layer: Any, query: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The queries of all ranks ``[N, T, h, D]`` in the cache's dtype, and its scales by name, each ``[1]``."""
        if not self.is_fp8:
            return exchange.gather_queries(query, get_dcp_group()), {}
        quantised, _ = _custom_ops.scaled_fp8_quant(query.reshape(query.shape[0], -1), layer._q_scale)
        # As bytes, which every version of NCCL knows.
        queries = exchange.gather_queries(quantised.view(torch.uint8).view(query.shape), get_dcp_group())
        scales = {"q_descale": layer._q_scale, "k_descale": layer._k_scale, "v_descale": layer._v_scale}
        return queries.view(current_platform.fp8_dtype()), scales

    def _caches(self, kv_cache: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values, each ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        caches = [with_packed_singletons(cache) for cache in kv_cache.unbind(self.kv_dim)]
        return [cache.view(current_platform.fp8_dtype()) for cache in caches] if self.is_fp8 else caches

    def _attend_decode_rows(
        self,
        queries: torch.Tensor,
        caches: list[torch.Tensor],
        dtype: torch.dtype,
        attn_metadata: DCPFlashAttentionMetadata,
        descales: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole step of rows of one token, by FlashAttention 3: out ``[N, T, h, D]``, lse ``[N, T, h]``."""
        out = torch.empty(queries.shape, dtype=dtype, device=queries.device)
        lse = fa3.attend_decode_rows(
            queries,
            caches[0],
            caches[1],
            out,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            num_splits=attn_metadata.max_num_splits,
            **{name: scale.expand(queries.shape[1], self.num_kv_heads) for name, scale in descales.items()},
        )
        return out, lse

    def _attend_any_rows(
        self,
        queries: torch.Tensor,
        caches: list[torch.Tensor],
        dtype: torch.dtype,
        attn_metadata: DCPFlashAttentionMetadata,
        descales: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that exchange, by any FlashAttention: out ``[N, T, h, D]``, lse ``[N, T, h]``, both views."""
        rows = attn_metadata.rows
        assert rows is not None
        num_ranks = queries.shape[0]
        queries = exchange.by_token(queries)
        out = torch.empty(queries.shape, dtype=dtype, device=queries.device)
        spans = [(0, rows.num_exchange_reqs)]
        if should_split_fa2_dcp_context_attention(
            self.vllm_flash_attn_version,
            attn_metadata.max_query_len,
            rows.num_exchange_reqs,
            rows.num_decodes,
            rows.num_exchange_reqs - rows.num_decodes,
        ):
            spans = [(0, rows.num_decodes), (rows.num_decodes, rows.num_exchange_reqs)]
        lses = [self._paged_call(queries, caches, out, attn_metadata, descales, *span) for span in spans]
        lse = lses[0] if len(lses) == 1 else torch.cat(lses, dim=1)
        return exchange.by_rank(out, num_ranks), exchange.by_rank(lse.transpose(0, 1), num_ranks)

    def _paged_call(
        self,
        queries: torch.Tensor,
        caches: list[torch.Tensor],
        out: torch.Tensor,
        attn_metadata: DCPFlashAttentionMetadata,
        descales: dict[str, torch.Tensor],
        first: int,
        last: int,
    ) -> torch.Tensor:
        """One FlashAttention call for rows ``first`` to ``last``; returns the LSE ``[H * N, tokens]``."""
        rows = attn_metadata.rows
        assert rows is not None
        is_decode_only = last <= rows.num_decodes
        begin = 0 if first == 0 else rows.num_decode_tokens
        end = rows.num_decode_tokens if is_decode_only else rows.num_exchange_tokens
        starts = attn_metadata.query_start_loc[first : last + 1]
        lse: torch.Tensor
        _, lse, *_ = flash_attn_varlen_func(
            queries[begin:end],
            *caches,
            out=out[begin:end],
            cu_seqlens_q=starts if begin == 0 else starts - begin,
            max_seqlen_q=1 if is_decode_only else attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens[first:last],
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table[first:last],
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            causal=False,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
            **{name: scale.expand(last - first, self.num_kv_heads) for name, scale in descales.items()},
        )
        if self.vllm_flash_attn_version == 2 and not is_decode_only:
            # Rows of several tokens without keys: it leaves their LSE unwritten.
            is_empty = attn_metadata.seq_lens[first:last] == 0
            lse.masked_fill_(torch.repeat_interleave(is_empty, starts.diff(), output_size=end - begin), -math.inf)
        return lse

    def _attend_new_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: DCPFlashAttentionMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Causal attention among the new tokens of rows that are no decode rows, merged with their context.

        Args:
            output: holds the combined context of the rows that exchanged; receives the result.
            lse: ``[num_exchange_tokens, num_heads]`` of that context, None where no row has any.
        """
        rows, starts = attn_metadata.rows, attn_metadata.new_query_start_loc
        assert rows is not None
        new = slice(rows.num_decode_tokens, rows.num_tokens)
        num_merged = rows.num_exchange_tokens - rows.num_decode_tokens
        own = torch.empty_like(output[new]) if num_merged else output[new]
        _, own_lse, *_ = flash_attn_varlen_func(
            query[new],
            key[new],
            value[new],
            out=own,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=rows.max_new_len,
            max_seqlen_k=rows.max_new_len,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            causal=True,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )
        if not num_merged:
            return
        assert lse is not None
        merged = slice(rows.num_decode_tokens, rows.num_exchange_tokens)
        merge_attn_states(
            output[merged],
            output[merged].clone(),
            lse[merged].transpose(0, 1).contiguous(),
            own[:num_merged],
            own_lse[:, :num_merged].contiguous(),
        )
        output[merged.stop : new.stop] = own[num_merged:]

    def _show_memory_to_the_profiler(self, query: torch.Tensor) -> None:
        """Take for a moment what the largest mixed step takes, so that the KV cache is sized beside it.

        Gathered queries in two orders, the partial output, and the exchange's send and receive buffers.
        """
        bytes_per_token = self.num_heads * self.head_size * query.element_size() * get_dcp_group().world_size
        total = 3 * self.max_num_tokens * bytes_per_token + 2 * exchange.MAX_ROUND_BYTES
        torch.empty(total, dtype=torch.uint8, device=query.device)
