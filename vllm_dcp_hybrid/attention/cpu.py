# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: attention over sharded KV in torch, as a backend in vLLM's registry under the name CPU_ATTN.

It stores keys and values side by side and unpacked (stock's CPU kernel packs keys for one instruction set and returns
no LSE), and computes with ``aten::_scaled_dot_product_flash_attention_for_cpu``, which returns the LSE in float32.
It is a product of its own and the reference for the CUDA engine: same plan, same exchange, same combine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backend import AttentionMetadata, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.attention import cpu_kernels, exchange
from vllm_dcp_hybrid.attention.combine import combine_torch
from vllm_dcp_hybrid.attention.plan import AttentionPlan, Row, make_plan
from vllm_dcp_hybrid.core import kv_cache_specs


@dataclass
class DCPCPUAttentionMetadata(AttentionMetadata):
    """What the engine needs to know of a step, for the layers of one sharded KV cache group.

    Attributes:
        block_table: ``[num_reqs, num_blocks]`` int32.
        plan: the step's rows by kind.
        exchange_tokens: ``[num_exchange_tokens]`` int64, the batch's tokens whose queries are gathered, decode rows
            first.
    """

    block_table: torch.Tensor
    plan: AttentionPlan
    exchange_tokens: torch.Tensor


class DCPCPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN under DCP."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]
    # The layer calls do_kv_cache_update before forward, also where stock's CPU backend writes inside of it (< 0.24).
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Blocks first, in every release (stock's is keys and values first up to 0.22)."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_impl_cls() -> type[DCPCPUAttentionImpl]:
        return DCPCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[DCPCPUAttentionMetadataBuilder]:
        return DCPCPUAttentionMetadataBuilder


class DCPCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Makes the plan, once per step and KV cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dcp_rank: int = get_dcp_group().rank_in_group
        self.geometry = kv_cache_specs.group_geometry(
            kv_cache_spec,
            dcp_world_size=get_dcp_group().world_size,
            interleave_size=activation.interleave_size(vllm_config),
            layer_names=layer_names,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:
        """The step's metadata; groups that store nothing are stock's business."""
        if not self.geometry.is_sharded:
            stock: AttentionMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return stock
        common = common_attn_metadata
        plan = make_plan(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens.tolist(),
            lambda length: self.geometry.local_len(length, self.dcp_rank),
        )
        tokens = [token for row in plan.exchange_rows for token in range(row.start, row.end)]
        return DCPCPUAttentionMetadata(
            block_table=common.block_table_tensor,
            plan=plan,
            exchange_tokens=torch.tensor(tokens, dtype=torch.int64),
        )


class DCPCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer over this rank's shard of the KV.

    KV cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, keys in the first half of the last dimension.
    """

    can_return_lse_for_decode = True
    supports_dcp = True
    # Rows of several tokens with context never read their own tokens from the cache, so any interleave is right.
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange = exchange.exchange_by_name(get_current_vllm_config().parallel_config.dcp_comm_backend)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new tokens that this rank owns; the others carry the pad slot.  Encoders keep no cache."""
        if self.attn_type == AttentionType.DECODER:
            cpu_kernels.write_kv(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention for the step's tokens.

        Args:
            query: ``[num_tokens, num_heads, head_size]``, this rank's heads.
            key, value: ``[num_tokens, num_kv_heads, head_size]``, the new tokens, on every rank.
            kv_cache: this rank's shard, the new tokens that it owns already written.
            output: ``[num_tokens, num_heads, head_size]``, written in place.
        """
        if not isinstance(attn_metadata, DCPCPUAttentionMetadata):
            result: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return result
        plan = attn_metadata.plan
        for row in plan.prefill_rows:
            output[row.start : row.end], _ = self._causal(row, query, key, value)
        if plan.needs_exchange:
            self._attend_with_context(plan, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _attend_with_context(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DCPCPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Decode and context rows: one gather of queries, one exchange of partial results for all of them."""
        dcp_group = get_dcp_group()
        queries = exchange.by_token(exchange.gather_queries(query[attn_metadata.exchange_tokens], dcp_group))
        partial = torch.zeros_like(queries)
        partial_lse = torch.full(queries.shape[:2], float("-inf"), dtype=torch.float32)
        offset = 0
        for row in plan.exchange_rows:
            tokens = slice(offset, offset + row.query_len)
            offset = tokens.stop
            if row.local_kv_len:
                keys, values = cpu_kernels.read_kv(kv_cache, attn_metadata.block_table[row.req], row.local_kv_len)
                partial[tokens], partial_lse[tokens] = cpu_kernels.attend(
                    queries[tokens],
                    keys,
                    values,
                    scale=self.scale,
                    num_head_groups=dcp_group.world_size,
                    soft_cap=self.logits_soft_cap,
                )
        num_ranks = dcp_group.world_size
        partials = exchange.by_rank(partial, num_ranks), exchange.by_rank(partial_lse, num_ranks)
        combined, combined_lse = self.exchange(*partials, dcp_group)
        offset = 0
        for row in plan.exchange_rows:
            tokens = slice(offset, offset + row.query_len)
            offset = tokens.stop
            result = combined[tokens]
            if row.query_len > 1:
                new, new_lse = self._causal(row, query, key, value)
                result, _ = combine_torch(torch.stack((result, new)), torch.stack((combined_lse[tokens], new_lse)))
            output[row.start : row.end] = result

    def _causal(
        self, row: Row, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention among a row's new tokens, for this rank's heads."""
        tokens = slice(row.start, row.end)
        return cpu_kernels.attend_causal(
            query[tokens], key[tokens], value[tokens], scale=self.scale, soft_cap=self.logits_soft_cap
        )
