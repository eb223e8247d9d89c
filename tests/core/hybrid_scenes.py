# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of a hybrid engine in miniature: real vLLM objects, hand-made KV cache groups, a pretended worker.

Imported by the `scenes` fixture only, for vLLM takes seconds to import.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_dcp_hybrid import plugin
from vllm_dcp_hybrid.core import kv_cache_specs as adapter
from vllm_dcp_hybrid.tiny_models import engine_arguments, make_tiny_model

__all__ = [
    "CopyOfUnwrittenBlock",
    "KVCacheManager",
    "PretendedWorker",
    "RequestStatus",
    "adapter",
    "kv_cache_coordinator",
    "kv_cache_utils",
    "plugin",
    "single_type_kv_cache_manager",
    "specs",
]

BLOCK = 272
HEAD_SIZE = 256

kv_cache_utils.init_none_hash(sha256)


def attention_spec(block_size: int = BLOCK, **changes: Any) -> Any:
    return specs.FullAttentionSpec(
        block_size=block_size, **{"num_kv_heads": 1, "head_size": HEAD_SIZE, "dtype": torch.bfloat16} | changes
    )


def mla_spec(block_size: int = BLOCK) -> Any:
    return specs.MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=2 * HEAD_SIZE, dtype=torch.bfloat16, cache_dtype_str="auto"
    )


def recurrent_spec(block_size: int = BLOCK, mode: str = "align", num_speculative_blocks: int = 0) -> Any:
    """A state that is padded to the page of 272 attention tokens."""
    return specs.MambaSpec(
        block_size=block_size,
        shapes=((64, 1024),),
        dtypes=(torch.float32,),
        page_size_padded=attention_spec().page_size_bytes,
        mamba_cache_mode=mode,
        num_speculative_blocks=num_speculative_blocks,
    )


def cache_config(group_specs: Sequence[Any], num_blocks: int = 1000, layers_per_group: int = 2) -> Any:
    """A `KVCacheConfig` with one group per spec."""
    groups = [
        specs.KVCacheGroupSpec([f"layers.{number}.{layer}" for layer in range(layers_per_group)], spec)
        for number, spec in enumerate(group_specs)
    ]
    return specs.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def hybrid_groups(mode: str = "align", attention: Any = None, recurrent_block: int = BLOCK) -> list[Any]:
    """Three recurrent groups and one of attention, in the order in which vLLM makes them."""
    return [*(recurrent_spec(recurrent_block, mode) for _ in range(3)), attention or attention_spec()]


@functools.cache
def _base_config(kind: str, dcp: int, caching: bool, budget: int) -> Any:
    folder = Path(tempfile.gettempdir()) / "vllm_dcp_hybrid_tests" / f"{kind}-core"
    model = make_tiny_model(kind, folder, num_layers=4, num_key_value_heads=1)
    return EngineArgs(
        model=str(model),
        tensor_parallel_size=4,
        decode_context_parallel_size=dcp,
        enable_prefix_caching=caching,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        async_scheduling=False,
        **engine_arguments(kind),  # type: ignore[arg-type]
    ).create_engine_config()


def engine_config(
    *,
    dcp: int,
    mode: str = "align",
    block_size: int = BLOCK,
    budget: int = 2048,
    max_len: int = 8192,
    num_blocks: int = 1000,
    interleave: int = 1,
    kind: str = "qwen3-next",
) -> Any:
    """A real `VllmConfig` as the engine core has it once block sizes are aligned."""
    config = copy.deepcopy(_base_config(kind, dcp, mode != "none", budget))
    config.cache_config.block_size = block_size
    config.cache_config.mamba_cache_mode = mode
    config.cache_config.num_gpu_blocks = num_blocks
    config.model_config.max_model_len = max_len
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    return config


def block_sizes(config: Any, groups: Any) -> tuple[int, int]:
    """(scheduler block, hash block), through the patched function."""
    sizes: tuple[int, int] = kv_cache_utils.resolve_kv_cache_block_sizes(groups, config)
    return sizes


def make_manager(config: Any, groups: Any, *, use_eagle: bool = False) -> Any:
    """A `KVCacheManager` as the scheduler makes it."""
    scheduler_block, hash_block = block_sizes(config, groups)
    arguments = {
        "kv_cache_config": groups,
        "max_model_len": config.model_config.max_model_len,
        "scheduler_block_size": scheduler_block,  # from 0.23 on
        "hash_block_size": hash_block,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enable_caching": config.cache_config.enable_prefix_caching,
        "use_eagle": use_eagle,
        "dcp_world_size": config.parallel_config.decode_context_parallel_size,
    }
    accepted = inspect.signature(KVCacheManager).parameters
    return KVCacheManager(**{name: value for name, value in arguments.items() if name in accepted})


def hit_unit(dcp: int, block_size: int = BLOCK) -> int:
    """Tokens of which a prefix hit is a multiple: one rank's block from 0.29 on, else an effective block."""
    is_cut = any(patch.name == "prefill-chunk-ends" for patch in plugin.status().feature.patches)  # type: ignore[union-attr]
    return block_size * dcp if is_cut else block_size


def keeps_states_of_common_prefixes() -> bool:
    """Whether this release ends a chunk where attention was cached and no state was (from 0.24 on)."""
    if "shared_prefix_boundary" in inspect.getsource(Request.__init__):  # from 0.26 on
        return True
    return "num_uncached_common_prefix_tokens" in inspect.signature(Scheduler._mamba_block_aligned_split).parameters


def kv_token_capacity(config: Any, groups: Any) -> int:
    """The tokens that vLLM reports to fit."""
    if hasattr(kv_cache_utils, "get_kv_cache_capacity"):  # from 0.24 on
        return int(kv_cache_utils.get_kv_cache_capacity(config, groups)[0])
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, groups)
    return int(concurrency * config.model_config.max_model_len)


def make_scheduler(config: Any, groups: Any) -> Any:
    """A `Scheduler` as the engine core makes it."""
    scheduler_block, hash_block = block_sizes(config, groups)
    scheduler = Scheduler(
        config,
        groups,
        StructuredOutputManager(config),
        block_size=scheduler_block,
        hash_block_size=hash_block,
    )
    scheduler.tests_hash_block = hash_block  # type: ignore[attr-defined]
    return scheduler


def make_request(name: str, tokens: Sequence[int], hash_block: int, max_tokens: int = 2) -> Any:
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(hash_block, sha256),
    )


def next_token(tokens: Sequence[int]) -> int:
    """What the pretended model samples: it depends on the prefix alone."""
    return 3 + hash((tokens[-1], len(tokens))) % 1000


class CopyOfUnwrittenBlock(AssertionError):
    """A hit that ends within a block got a copy of a block which another request of the same step is yet to write.

    A fault of stock vLLM from 0.29 on, where sharded blocks are larger than recurrent ones: copies are made before the
    step, and the guard against hits of the same step looks at recurrent blocks only.
    """


@dataclass
class PretendedWorker:
    """Follows block ids as the V1 runner does, and stores which prefix each slot and each state belongs to.

    Attention writes single positions under a block id, a recurrent group one state; a step reads all positions before
    it and the state after exactly these.  Whatever it reads must come from the request's own prefix.
    """

    geometry: Any
    num_blocks: int
    max_len: int
    rows: dict[str, list[list[int]]] = field(default_factory=dict)
    # Block id -> (group, content): the groups share one pool, so a block that changes hands loses its content.
    memory: dict[int, tuple[int, dict[int, int]]] = field(default_factory=dict)
    state_columns: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    num_reads_checked: int = 0
    copied_too_early: set[int] = field(default_factory=set)

    def step(self, output: Any, tokens_of: Callable[[str], list[int]]) -> None:
        """Carry out a `SchedulerOutput`."""
        for name in [*output.finished_req_ids, *(output.preempted_req_ids or ())]:
            self.rows.pop(name, None)
            self.state_columns.pop(name, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self.rows[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, ids, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[name] = start
            if name in cached.resumed_req_ids:
                self.state_columns.pop(name, None)
                self.rows[name] = [list(group_ids) for group_ids in ids]
            elif ids is not None:
                for row, group_ids in zip(self.rows[name], ids, strict=True):
                    row.extend(group_ids)
        chunks = {
            name: (computed[name], computed[name] + length) for name, length in output.num_scheduled_tokens.items()
        }
        self.steps.append(chunks)
        # A hit that ends within a block gets a copy of it (from 0.29 on).
        copies = dict(map(reversed, getattr(output, "kv_cache_block_copies", None) or ()))
        for target, source in copies.items():
            group, content = self.memory.get(source, (-1, {}))
            self.memory[target] = (group, dict(content))
        written = self._blocks_written(chunks) if copies else set()
        self.copied_too_early = {target for target, source in copies.items() if source in written}
        prefixes = {name: _prefix_ids(tokens_of(name), end) for name, (_, end) in chunks.items()}
        # As a layer does: states are read before any is written, keys and values are written before any is read.
        for name, (start, _) in chunks.items():
            self._check_rows(name)
            self._read_states(name, start, prefixes[name])
        for name, (start, end) in chunks.items():
            self._write(name, start, end, prefixes[name])
        for name, (start, _) in chunks.items():
            self._read_positions(name, start, prefixes[name])

    def _check_rows(self, name: str) -> None:
        for number, (row, group) in enumerate(zip(self.rows[name], self.geometry.groups, strict=True)):
            assert all(0 <= block < self.num_blocks for block in row), f"{name}: block id out of range in {row}"
            width = group.table_width(self.max_len)
            assert len(row) <= width, f"{name}: {len(row)} blocks in a row of {width} of group {number}"

    def _read_states(self, name: str, start: int, prefix: list[int]) -> None:
        for number, (row, group) in enumerate(zip(self.rows[name], self.geometry.groups, strict=True)):
            if group.is_recurrent and start:
                column = self._state_column(name, start, group)
                assert self._content(number, row[column]).get(0) == prefix[start], (
                    f"{name}: the state in column {column} of group {number} is not that of {start} tokens"
                )
                self.num_reads_checked += 1

    def _read_positions(self, name: str, start: int, prefix: list[int]) -> None:
        for number, (row, group) in enumerate(zip(self.rows[name], self.geometry.groups, strict=True)):
            if group.is_recurrent:
                continue
            size = group.effective_block_size
            for column in range(-(-start // size)):
                content = self._content(number, row[column])
                for position in range(column * size, min(start, (column + 1) * size)):
                    is_own = content.get(position % size) == prefix[position + 1]
                    if not is_own and row[column] in self.copied_too_early:
                        raise CopyOfUnwrittenBlock(f"{name}: position {position} of group {number}")
                    assert is_own, f"{name}: position {position} of group {number} is not this request's"
                    self.num_reads_checked += 1

    def _write(self, name: str, start: int, end: int, prefix: list[int]) -> None:
        for number, (row, group) in enumerate(zip(self.rows[name], self.geometry.groups, strict=True)):
            if group.is_recurrent:
                column = 0 if group.recurrent_mode == "none" else -(-end // group.block_size) - 1
                self.state_columns[name] = column
                assert row[column] != 0, f"{name}: the running state of group {number} has the null block"
                self._content(number, row[column])[0] = prefix[end]
                continue
            size = group.effective_block_size
            for position in range(start, end):
                block = row[position // size]
                assert block != 0, f"{name}: position {position} of group {number} has the null block"
                self._content(number, block)[position % size] = prefix[position + 1]

    def _blocks_written(self, chunks: dict[str, tuple[int, int]]) -> set[int]:
        """Blocks of attention that the step writes."""
        return {
            row[position // group.effective_block_size]
            for name, (start, end) in chunks.items()
            for row, group in zip(self.rows[name], self.geometry.groups, strict=True)
            if not group.is_recurrent
            for position in range(start, end)
        }

    def _state_column(self, name: str, start: int, group: Any) -> int:
        if group.recurrent_mode == "none":
            return 0
        # As `preprocess_mamba` (0.25.1) finds the state to go on from.
        return self.state_columns.get(name, (start - 1) // group.block_size)

    def _content(self, number: int, block: int) -> dict[int, int]:
        if self.memory.setdefault(block, (number, {}))[0] != number:
            self.memory[block] = (number, {})
        return self.memory[block][1]


def _prefix_ids(tokens: list[int], end: int) -> list[int]:
    """Entry k identifies the first k tokens."""
    ids = [0]
    for token in tokens[:end]:
        ids.append(hash((ids[-1], token)))
    return ids


@dataclass
class Engine:
    """A scheduler, a pretended worker and a pretended model in a loop."""

    config: Any
    groups: Any
    scheduler: Any = None
    worker: Any = None
    hits: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.config, self.groups)
        geometry = adapter.cache_geometry(self.groups, self.config)
        self.worker = PretendedWorker(geometry, self.groups.num_blocks, self.config.model_config.max_model_len)

    def add(self, name: str, tokens: Sequence[int], max_tokens: int = 2) -> None:
        self.scheduler.add_request(make_request(name, tokens, self.scheduler.tests_hash_block, max_tokens))

    def step(self) -> None:
        requests = dict(self.scheduler.requests)
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self.hits[new.req_id] = new.num_computed_tokens
        self.worker.step(output, lambda name: list(requests[name].all_token_ids))
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = requests[name]
            is_complete = request.num_computed_tokens >= request.num_tokens
            sampled.append([next_token(request.all_token_ids)] if is_complete else [])
            self.outputs.setdefault(name, []).extend(sampled[-1])
        index = {name: number for number, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, sampled))

    def run(self, max_steps: int = 10_000) -> None:
        """Until all requests have finished."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {max_steps} steps")

    def run_one(self, name: str, tokens: Sequence[int], max_tokens: int = 2) -> int:
        """The prefix hit of one request, in tokens."""
        self.add(name, tokens, max_tokens)
        self.run()
        return self.hits[name]

    def chunk_ends(self, name: str) -> list[int]:
        return [chunks[name][1] for chunks in self.worker.steps if name in chunks]


def make_engine(
    *, dcp: int, num_blocks: int = 1000, group_specs: Sequence[Any] | None = None, **options: Any
) -> Engine:
    config = engine_config(dcp=dcp, num_blocks=num_blocks, **options)
    mode = config.cache_config.mamba_cache_mode
    return Engine(config, cache_config(group_specs or hybrid_groups(mode), num_blocks))
