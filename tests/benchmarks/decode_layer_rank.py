# SPDX-License-Identifier: Apache-2.0
"""One rank of ``decode_layer.py``: attention layers of the vLLM that this Python has, without the rest of the model.

Reads a case per line of standard input, JSON, and answers ``RESULT {...}`` on standard output.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

DCP = 2
NUM_LAYERS = 8  # each with a cache of its own, so that short contexts do not live in the L2 cache
CHUNK = 1 << 18


@dataclass(frozen=True)
class Case:
    """One point of the benchmark; `is_graph`: replayed from a CUDA graph, else launched call by call."""

    batch: int
    context: int
    comm: str
    is_graph: bool
    seed: int = 0


def engine_config(model: str, max_len: int, max_batch: int) -> Any:
    """vLLM's config of TP 2 DCP 2."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        load_format="dummy",
        tensor_parallel_size=DCP,
        decode_context_parallel_size=DCP,
        max_model_len=max_len,
        max_num_seqs=max_batch,
        max_num_batched_tokens=8192,
    ).create_engine_config()


def backend(*, is_plugin: bool) -> Any:
    """The FLASH_ATTN backend: upstream's, or the one that the plugin puts in its place."""
    if is_plugin:
        from vllm_dcp_hybrid.attention.flash_attn import DCPFlashAttentionBackend as Backend
    else:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Backend
    return Backend


class Layers:
    """`NUM_LAYERS` attention layers, their caches and the builder of their metadata."""

    def __init__(self, vllm_config: Any, rank: int, block_size: int, num_slots: int, *, is_plugin: bool) -> None:
        from vllm.config import CUDAGraphMode, set_current_vllm_config
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        device = torch.device("cuda", rank)
        self.vllm_config, self.device, self.block_size = vllm_config, device, block_size
        self.backend = backend(is_plugin=is_plugin)
        model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
        self.num_heads = model_config.get_num_attention_heads(parallel_config)
        self.head_size = model_config.get_head_size()
        self.dtype = torch.bfloat16
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=self.head_size, dtype=self.dtype)
        self.builders, self.impls = {}, {}
        with set_current_vllm_config(vllm_config):
            for is_graph, mode in ((True, vllm_config.compilation_config.cudagraph_mode), (False, CUDAGraphMode.NONE)):
                vllm_config.compilation_config.cudagraph_mode = mode
                self.builders[is_graph] = self.backend.get_builder_cls()(spec, ["layer.0"], vllm_config, device)
            for comm in ("ag_rs", "a2a"):
                parallel_config.dcp_comm_backend = comm
                self.impls[comm] = self.backend.get_impl_cls()(
                    num_heads=self.num_heads,
                    head_size=self.head_size,
                    scale=self.head_size**-0.5,
                    num_kv_heads=1,
                    alibi_slopes=None,
                    sliding_window=None,
                    kv_cache_dtype="auto",
                )
        one = torch.ones(1, device=device)
        self.scales = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        self.num_blocks = -(-num_slots // block_size) + 1
        self.caches = [self._new_cache(layer * DCP + rank) for layer in range(NUM_LAYERS)]

    def _new_cache(self, seed: int) -> torch.Tensor:
        """A full cache in the backend's own layout, the same tokens in the same slots for every version."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            shape = self.backend.get_kv_cache_shape(self.num_blocks, self.block_size, 1, self.head_size)
            order = self.backend.get_kv_cache_stride_order()
        stored = torch.zeros([shape[dim] for dim in order], dtype=self.dtype, device=self.device)
        cache = stored.permute([order.index(dim) for dim in range(len(order))])
        generator = torch.Generator(self.device).manual_seed(seed)
        num_slots = self.num_blocks * self.block_size
        for start in range(0, num_slots, CHUNK):
            slots = torch.arange(start, min(start + CHUNK, num_slots), device=self.device)
            kv = torch.randn(
                (2, len(slots), 1, self.head_size), generator=generator, dtype=self.dtype, device=self.device
            )
            self.impls["a2a"].do_kv_cache_update(self.scales, kv[0], kv[1], cache, slots)
        return cache


class Step:
    """The tensors of one decode step of a case."""

    def __init__(self, layers: Layers, case: Case, rank: int) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.layers, self.case = layers, case
        device, block = layers.device, layers.block_size
        generator = torch.Generator().manual_seed(case.seed)
        num_columns = -(-layers.vllm_config.model_config.max_model_len // (block * DCP))
        used = -(-case.context // (block * DCP))
        ids = torch.randperm(layers.num_blocks - 1, generator=generator)[: case.batch * used] + 1
        self.table = torch.zeros(case.batch, num_columns, dtype=torch.int32)
        self.table[:, :used] = ids.view(case.batch, used)
        # Lengths either side of the context, all at least half an interleave round apart from a full block.
        lens = case.context - torch.arange(case.batch) % 7
        self.slots = self._slots(lens, rank).to(device)
        self.table = self.table.to(device)
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        arguments = {
            "query_start_loc": starts.to(device),
            "query_start_loc_cpu": starts,
            "seq_lens": lens.to(torch.int32).to(device),
            "num_reqs": case.batch,
            "num_actual_tokens": case.batch,
            "max_query_len": 1,
            "max_seq_len": int(lens.max()),
            "block_table_tensor": self.table,
            "slot_mapping": self.slots,
            "causal": True,
            "seq_lens_cpu_upper_bound": lens.to(torch.int32),
        }
        known = {field.name for field in fields(CommonAttentionMetadata)}
        self.common = CommonAttentionMetadata(**{name: value for name, value in arguments.items() if name in known})
        shape = (NUM_LAYERS, case.batch, layers.num_heads * DCP, layers.head_size)
        on_device = torch.Generator(device).manual_seed(case.seed + 1)
        queries = torch.randn(shape, generator=on_device, dtype=layers.dtype, device=device)
        own = slice(rank * layers.num_heads, (rank + 1) * layers.num_heads)
        self.queries = queries[:, :, own].contiguous()
        kv_shape = (2, NUM_LAYERS, case.batch, 1, layers.head_size)
        self.keys, self.values = torch.randn(kv_shape, generator=on_device, dtype=layers.dtype, device=device)
        self.outputs = torch.full_like(self.queries, float("nan"))
        for layer, cache in enumerate(layers.caches):
            layers.impls[case.comm].do_kv_cache_update(
                layers.scales, self.keys[layer], self.values[layer], cache, self.slots
            )

    def _slots(self, lens: torch.Tensor, rank: int) -> torch.Tensor:
        """Where the new tokens go at interleave 1; -1 on the rank that does not own them."""
        last = lens - 1
        local = last // DCP
        blocks = self.table[torch.arange(len(lens)), local // self.layers.block_size].long()
        slots = blocks * self.layers.block_size + local % self.layers.block_size
        return torch.where(last % DCP == rank, slots, -1)

    def metadata(self, *, is_capture: bool = False) -> Any:
        """What the builder of this version makes of the step, as for a real capture where asked."""
        common = self.common
        builder = self.layers.builders[self.case.is_graph]
        if is_capture:
            common = replace(common, max_seq_len=self.layers.vllm_config.model_config.max_model_len)
            return builder.build_for_cudagraph_capture(common)
        return builder.build(0, common)

    def run(self, metadata: Any) -> None:
        """All layers once."""
        layers = self.layers
        impl = layers.impls[self.case.comm]
        for layer, cache in enumerate(layers.caches):
            impl.forward(
                layers.scales,
                self.queries[layer],
                self.keys[layer],
                self.values[layer],
                cache,
                metadata,
                self.outputs[layer],
            )


def times_of_graph(step: Step, repeats: int) -> list[float]:
    """Microseconds per layer of each replay."""
    step.run(step.metadata())
    captured = step.metadata(is_capture=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.run(captured)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step.run(captured)
    torch.cuda.current_stream().wait_stream(stream)
    step.metadata()
    step.outputs.fill_(float("nan"))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    barrier()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [1000 * one.elapsed_time(two) / NUM_LAYERS for one, two in pairwise(events)]
    graph.reset()
    return times


def times_of_calls(step: Step, repeats: int) -> list[float]:
    """Microseconds per layer of each run, launches included."""
    metadata = step.metadata()
    for _ in range(3):
        step.run(metadata)
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        barrier()
        begin = time.perf_counter()
        step.run(metadata)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin) / NUM_LAYERS)
    return times


def kernels_of_calls(step: Step) -> list[str]:
    """Names of the kernels and copies of one layer, in order."""
    from torch.profiler import ProfilerActivity, profile

    metadata = step.metadata()
    step.run(metadata)
    torch.cuda.synchronize()
    barrier()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step.run(metadata)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    return [event.name[:100] for event in events]


def barrier() -> None:
    from vllm.distributed import get_dcp_group

    torch.distributed.barrier(group=get_dcp_group().cpu_group)


def answer(layers: Layers, case: Case, rank: int, repeats: int, *, with_kernels: bool) -> dict[str, Any]:
    """Times of one case, the first values of its outputs, and the kernels of its layers where asked."""
    step = Step(layers, case, rank)
    times = (times_of_graph if case.is_graph else times_of_calls)(step, repeats)
    outputs = step.outputs.float()
    result = {
        "median_us": statistics.median(times),
        "min_us": min(times),
        "times_us": [round(value, 2) for value in times],
        "has_nan": bool(outputs.isnan().any()),
        "sample": [round(value, 4) for value in outputs[:, :, 0, :2].flatten().tolist()[:256]],
    }
    if with_kernels:
        result["kernels"] = kernels_of_calls(step)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plugin", action="store_true", help="the plugin's layers, not upstream's")
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--max-context", type=int, required=True)
    parser.add_argument("--max-batch", type=int, required=True)
    arguments = parser.parse_args()

    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_dcp_group
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    device = torch.device("cuda", arguments.rank)
    torch.cuda.set_device(device)
    vllm_config = engine_config(arguments.model, arguments.max_context + 64, arguments.max_batch)
    with set_current_vllm_config(vllm_config):
        init_worker_distributed_environment(
            vllm_config, arguments.rank, f"tcp://127.0.0.1:{arguments.port}", arguments.rank
        )
    init_workspace_manager(device)
    rounds = -(-arguments.max_context // (arguments.block_size * DCP))
    num_slots = arguments.max_batch * rounds * arguments.block_size
    layers = Layers(vllm_config, arguments.rank, arguments.block_size, num_slots, is_plugin=arguments.plugin)
    impl = layers.impls["a2a"]
    print("RESULT", json.dumps(
        {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "nccl": get_dcp_group().device_communicator.pynccl_comm.nccl_version,
            "device": torch.cuda.get_device_name(device),
            "impl": f"{type(impl).__module__}.{type(impl).__name__}",
            "flash_attention": impl.vllm_flash_attn_version,
            "num_heads_per_rank": layers.num_heads,
            "head_size": layers.head_size,
        }
    ), flush=True)  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        case = Case(**request["case"])
        with set_current_vllm_config(vllm_config), torch.inference_mode():
            result = answer(layers, case, arguments.rank, request["repeats"], with_kernels=request["with_kernels"])
        gc.collect()
        torch.cuda.empty_cache()
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
