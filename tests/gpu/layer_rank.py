# SPDX-License-Identifier: Apache-2.0
"""One rank of ``test_gpu_layer.py``: the plugin's attention layer on random rows, against attention in float32.

    python layer_rank.py --rank R --port P --model DIR CASES.json OUT.json

Both ranks draw the same tokens; each caches its own. OUT.json of rank r holds, per case, how far its heads' outputs are
from attention in float32 over whole sequences, and how far one FlashAttention call without DCP is.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

DCP = 2
HEAD_SIZE = 128
MAX_LEN = 131_072
FAR = 1 << 15  # query-key products of the reference at a time


@dataclass(frozen=True)
class Row:
    """A request's part of a step: tokens that are cached, and new ones."""

    context: int
    new: int

    @property
    def length(self) -> int:
        return self.context + self.new


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        rows: (context, new) of each request, in vLLM's order: one new token, several with context, no context.
        num_padded: rows of no token at the end, as a graph's.
        kv_scales: of keys and values in an FP8 cache; None for bfloat16.
    """

    rows: tuple[tuple[int, int], ...]
    comm: str
    interleave: int
    block_size: int
    flash_attention: int
    num_padded: int = 0
    kv_scales: tuple[float, float] | None = None
    seed: int = 0


def engine_config(case: Case, model: str) -> Any:
    """vLLM's config of TP 2 DCP 2 for this case's layer."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        load_format="dummy",
        tensor_parallel_size=DCP,
        decode_context_parallel_size=DCP,
        dcp_comm_backend=case.comm,
        cp_kv_cache_interleave_size=case.interleave,
        kv_cache_dtype="fp8" if case.kv_scales else "auto",
        attention_config={"flash_attn_version": case.flash_attention},
        # vLLM's own choice of executor asks for a device per rank.
        distributed_executor_backend="mp",
        disable_custom_all_reduce=torch.cuda.device_count() < DCP,
        max_model_len=MAX_LEN + 64,
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        enforce_eager=True,
    ).create_engine_config()


class Tokens:
    """The step's tokens, equal on all ranks: per row the keys and values of the sequence, queries of the new ones."""

    def __init__(self, case: Case, num_heads: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(case.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.rows = [Row(*row) for row in case.rows]
        self.keys = [draw(row.length, 1, HEAD_SIZE) for row in self.rows]
        self.values = [draw(row.length, 1, HEAD_SIZE) for row in self.rows]
        self.queries = [draw(row.new, num_heads, HEAD_SIZE) for row in self.rows]

    def new(self, whole: list[torch.Tensor]) -> torch.Tensor:
        """The new tokens' part, rows one after the other."""
        return torch.cat([tensor[row.context :] for tensor, row in zip(whole, self.rows, strict=True)])


def exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence in float32 ``[new, heads, D]``, one KV head."""
    new, length = query.shape[0], keys.shape[0]
    outputs = []
    step = max(1, FAR * 64 // length)
    for begin in range(0, new, step):
        part = query[begin : begin + step].double() if length < 4096 else query[begin : begin + step].float()
        scores = torch.einsum("thd,ld->thl", part, keys[:, 0].to(part)) * HEAD_SIZE**-0.5
        ends = torch.arange(begin, begin + part.shape[0], device=keys.device) + length - new
        hidden = torch.arange(length, device=keys.device)[None] > ends[:, None]
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        outputs.append(torch.einsum("thl,ld->thd", weights, values[:, 0].to(part)).float())
    return torch.cat(outputs)


class Shard:
    """This rank's cache and block table."""

    def __init__(self, case: Case, tokens: Tokens, rank: int, device: torch.device) -> None:
        self.case, self.rank = case, rank
        used = [-(-row.length // (case.block_size * DCP)) for row in tokens.rows]
        self.num_blocks = sum(used) + 1
        num_rows = len(used) + case.num_padded
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(case.seed)) + 1
        num_columns = -(-(MAX_LEN + 64) // (case.block_size * DCP))
        self.table = torch.zeros(num_rows, num_columns, dtype=torch.int32)
        for row, (ids, width) in enumerate(zip(order.split(used), used, strict=True)):
            self.table[row, :width] = ids
        self.device = device

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        """Where a row's tokens go, -1 for those of another rank: by the definition, token by token."""
        interleave, block = self.case.interleave, self.case.block_size
        positions = torch.arange(first, last)
        group, inside = positions // interleave, positions % interleave
        local = group // DCP * interleave + inside
        slots = self.table[row].long()[local // block] * block + local % block
        return torch.where(group % DCP == self.rank, slots, -1).to(self.device)


def common_metadata(case: Case, tokens: Tokens, shard: Shard) -> Any:
    """What vLLM's runner hands to a metadata builder."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    news = [row.new for row in tokens.rows] + [0] * case.num_padded
    lens = torch.tensor([row.length for row in tokens.rows] + [0] * case.num_padded, dtype=torch.int32)
    starts = torch.tensor([0, *news], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = [shard.slots(number, row.context, row.length) for number, row in enumerate(tokens.rows)]
    arguments = {
        "query_start_loc": starts.to(shard.device),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.to(shard.device),
        "num_reqs": len(news),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(news),
        "max_seq_len": int(lens.max()),
        "block_table_tensor": shard.table.to(shard.device),
        "slot_mapping": torch.cat(slots),
        "causal": True,
        "seq_lens_cpu_upper_bound": lens,
    }
    known = {field.name for field in fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in arguments.items() if name in known})


def layer_output(case: Case, vllm_config: Any, tokens: Tokens, rank: int, device: torch.device) -> torch.Tensor:
    """The plugin's layer: KV of the context and of the new tokens written, then one forward."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_dcp_hybrid.attention.flash_attn import DCPFlashAttentionBackend as Backend

    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    dtype = torch.uint8 if case.kv_scales else torch.bfloat16
    spec = FullAttentionSpec(block_size=case.block_size, num_kv_heads=1, head_size=HEAD_SIZE, dtype=dtype)
    builder = Backend.get_builder_cls()(spec, ["layer.0"], vllm_config, device)
    impl = Backend.get_impl_cls()(
        num_heads=num_heads,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="fp8" if case.kv_scales else "auto",
    )
    if impl.vllm_flash_attn_version != case.flash_attention:
        raise RuntimeError(f"FlashAttention {impl.vllm_flash_attn_version} instead of {case.flash_attention}")
    k_scale, v_scale = (torch.full((1,), scale, device=device) for scale in case.kv_scales or (1.0, 1.0))
    layer = SimpleNamespace(_q_scale=torch.ones(1, device=device), _k_scale=k_scale, _v_scale=v_scale)
    shard = Shard(case, tokens, rank, device)
    shape = Backend.get_kv_cache_shape(shard.num_blocks, case.block_size, 1, HEAD_SIZE)
    order = Backend.get_kv_cache_stride_order()
    stored = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    # What nobody has written is no number, wherever it is read.
    stored.view(torch.uint8).fill_(0xFF)
    cache = stored.permute([order.index(dim) for dim in range(len(order))])
    for number, row in enumerate(tokens.rows):
        slots = shard.slots(number, 0, row.length)
        impl.do_kv_cache_update(layer, tokens.keys[number], tokens.values[number], cache, slots)
    own = slice(rank * num_heads, (rank + 1) * num_heads)
    query = torch.cat(tokens.queries)[:, own].contiguous()
    output = torch.full_like(query, float("nan"))
    metadata = builder.build(0, common_metadata(case, tokens, shard))
    impl.forward(layer, query, tokens.new(tokens.keys), tokens.new(tokens.values), cache, metadata, output)
    torch.cuda.synchronize()
    return output


def plain_output(case: Case, tokens: Tokens, own: slice) -> torch.Tensor:
    """FlashAttention without DCP, row by row, over pages that hold whole sequences."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    outputs = []
    for row, query in enumerate(tokens.queries):
        caches, descales = paged(case, tokens, row)
        length = tokens.rows[row].length
        own_query = query[:, own].contiguous()
        output = torch.empty_like(own_query)
        flash_attn_varlen_func(
            own_query.to(caches[0].dtype),
            *caches,
            out=output,
            cu_seqlens_q=torch.tensor([0, query.shape[0]], dtype=torch.int32, device=query.device),
            seqused_k=torch.tensor([length], dtype=torch.int32, device=query.device),
            max_seqlen_q=query.shape[0],
            max_seqlen_k=length,
            block_table=torch.arange(caches[0].shape[0], dtype=torch.int32, device=query.device)[None],
            softmax_scale=HEAD_SIZE**-0.5,
            causal=True,
            fa_version=case.flash_attention,
            **descales,
        )
        outputs.append(output)
    return torch.cat(outputs)


def paged(case: Case, tokens: Tokens, row: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """A row's keys and values in pages of 16 ``[pages, 16, 1, D]``, and the scales of an FP8 cache by name."""
    caches = []
    for whole, scale in zip((tokens.keys[row], tokens.values[row]), case.kv_scales or (1.0, 1.0), strict=True):
        pages = torch.nn.functional.pad(whole, (0, 0, 0, 0, 0, -whole.shape[0] % 16)).view(-1, 16, 1, HEAD_SIZE)
        caches.append((pages.float() / scale).to(torch.float8_e4m3fn) if case.kv_scales else pages)
    if not case.kv_scales:
        return caches, {}
    scales = zip(("q_descale", "k_descale", "v_descale"), (1.0, *case.kv_scales), strict=True)
    return caches, {name: torch.full((1, 1), scale, device=caches[0].device) for name, scale in scales}


def errors(output: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Relative error over all tokens, and that of the worst token and head."""
    gap, norm = (output.float() - expected).norm(dim=-1), expected.norm(dim=-1)
    return {"relative": float(gap.norm() / norm.norm()), "worst": float((gap / norm).max())}


def answer(case: Case, vllm_config: Any, rank: int, device: torch.device) -> dict[str, Any]:
    """Errors of the layer and of plain attention, per kind of row."""
    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    tokens = Tokens(case, num_heads * DCP, device)
    own = slice(rank * num_heads, (rank + 1) * num_heads)
    output = layer_output(case, vllm_config, tokens, rank, device)
    plain = plain_output(case, tokens, own)
    found: dict[str, Any] = {}
    kinds = ["decode" if row.new == 1 else "chunk" if row.context else "fresh" for row in tokens.rows]
    sizes = [row.new for row in tokens.rows]
    parts = zip(kinds, output.split(sizes), plain.split(sizes), range(len(sizes)), strict=True)
    for kind, ours, theirs, row in parts:
        expected = exact(tokens.queries[row][:, own], tokens.keys[row], tokens.values[row])
        of_row = {"row": case.rows[row], "layer": errors(ours, expected), "plain": errors(theirs, expected)}
        found.setdefault(kind, []).append(of_row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()

    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    device = torch.device("cuda", arguments.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    cases = [Case(**case) for case in json.loads(arguments.cases.read_text())]
    first = engine_config(cases[0], arguments.model)
    with set_current_vllm_config(first):
        init_worker_distributed_environment(first, arguments.rank, f"tcp://127.0.0.1:{arguments.port}", device.index)
    init_workspace_manager(device)
    found = []
    configs: dict[tuple[Any, ...], Any] = {}
    for case in cases:
        key = (case.comm, case.interleave, case.kv_scales is None, case.flash_attention)
        vllm_config = configs.get(key) or engine_config(case, arguments.model)
        configs[key] = vllm_config
        with set_current_vllm_config(vllm_config), torch.inference_mode():
            found.append(answer(case, vllm_config, arguments.rank, device))
        torch.cuda.empty_cache()
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
