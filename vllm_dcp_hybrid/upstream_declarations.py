# SPDX-License-Identifier: Apache-2.0
"""Changes to releases that have hybrid DCP of their own (0.26 on): see :mod:`vllm_dcp_hybrid.declarations`.

On GPUs upstream's path stays as it is and is looked at; what a release gets wrong is mended.  On CPUs, where stock
refuses DCP in all of them, the scheduler's side, block tables and specs are upstream's as well.
"""

from __future__ import annotations

from vllm_dcp_hybrid.patching import Patch

SINCE_UPSTREAM = ">=0.26"
_ARGS = "vllm.engine.arg_utils"
_CORE = "vllm.v1.core"
_BACKENDS = "vllm.v1.attention.backends"
_TABLE = "vllm.v1.worker.block_table"
_NO_DCP_ON_CPUS = "vLLM has Decode Context Parallelism on CPUs"

# What upstream's hybrid DCP consists of, and is looked at in memory before it is said to be in use.
UPSTREAM_ENGINE_CORE = (
    f"{_CORE}.kv_cache_utils:resolve_kv_cache_block_sizes",
    f"{_CORE}.kv_cache_coordinator:get_kv_cache_coordinator",
    f"{_CORE}.kv_cache_coordinator:HybridKVCacheCoordinator",
    f"{_CORE}.kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache",
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager",
    f"{_CORE}.single_type_kv_cache_manager:MambaManager",
)
UPSTREAM_WORKER = (
    f"{_TABLE}:BlockTable",
    f"{_TABLE}:MultiGroupBlockTable",
    "vllm.v1.worker.gpu.block_table:BlockTables",
    "vllm.v1.kv_cache_interface:MambaSpec",
    "vllm.v1.kv_cache_interface:AttentionSpec",
    f"{_BACKENDS}.flash_attn:FlashAttentionBackend",
    f"{_BACKENDS}.flash_attn:FlashAttentionMetadataBuilder",
    f"{_BACKENDS}.flash_attn:FlashAttentionImpl",
)

ENTRY_PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            name="config-switches",
            target=f"{_ARGS}:EngineArgs.create_engine_config",
            how="wrap",
            replacement=f"vllm_dcp_hybrid.engine.upstream_config:{replacement}",
            processes=("api_server",),
            releases=releases,
            why=why,
            until="vLLM offers general plugins a hook on the finished configuration",
        )
        for replacement, releases, why in (
            (
                "create_engine_config_without_v2",
                ">=0.26,<0.29",
                "the switches are read here; the V2 runner sizes recurrent rows N times too short (vllm#50493)",
            ),
            (
                "create_engine_config",
                ">=0.29",
                "the switches are read, and what CPUs cannot do is refused, where the configuration is built",
            ),
        )
    ),
)

FEATURE_PATCHES: tuple[Patch, ...] = (
    # The API process
    Patch(
        name="config-world-size",
        target=f"{_ARGS}:EngineArgs.create_model_config",
        how="wrap",
        replacement="vllm_dcp_hybrid.engine.upstream_config:create_model_config",
        leans_on=("vllm.config.model:ModelConfig.verify_with_parallel_config",),
        processes=("api_server",),
        releases=SINCE_UPSTREAM,
        why="on CPUs an illegal size is refused with the largest legal one; on GPUs that is stock's business",
        until="vLLM names the largest legal DCP size",
    ),
    # The engine core
    Patch(
        name="engine-core-report",
        target=f"{_CORE}.sched.scheduler:Scheduler.__init__",
        how="wrap",
        replacement="vllm_dcp_hybrid.core.upstream_report:scheduler_init",
        leans_on=UPSTREAM_ENGINE_CORE,
        processes=("engine_core",),
        releases=SINCE_UPSTREAM,
        why="says whose hybrid DCP schedules here, after a look at the objects in use",
        until="vLLM logs the placement of its KV cache groups",
    ),
    Patch(
        name="prefill-chunk-ends",
        target=f"{_CORE}.sched.scheduler:Scheduler._mamba_block_aligned_split",
        how="wrap",
        replacement="vllm_dcp_hybrid.core.upstream_split:mamba_block_aligned_split",
        leans_on=(f"{_CORE}.sched.scheduler:Scheduler.__init__",),
        processes=("engine_core",),
        releases=">=0.26,<0.29",
        why="chunks end on one rank's block, where no prefix hit can end: a repeated prompt of 1,377 tokens hits none",
        until="0.29.0",
    ),
    # The workers
    Patch(
        name="worker-backends",
        target="vllm.v1.worker.worker_base:WorkerBase.__init__",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.startup:worker_base_init_on_cpu",
        leans_on=(
            f"{_BACKENDS}.registry:register_backend",
            f"{_BACKENDS}.cpu_attn:CPUAttentionBackend",
            f"{_BACKENDS}.cpu_attn:CPUAttentionMetadata",
            f"{_BACKENDS}.cpu_attn:CPUAttentionMetadataBuilder",
            f"{_BACKENDS}.cpu_attn:CPUAttentionBackendImpl",
            "vllm.v1.attention.backend:AttentionImplBase.__new__",
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
            "vllm.v1.worker.cp_utils:check_attention_cp_compatibility",
        ),
        processes=("worker",),
        releases=SINCE_UPSTREAM,
        why="stock's attention backend for CPUs does not return the LSE",
        until=_NO_DCP_ON_CPUS,
    ),
    Patch(
        name="layer-checks",
        target="vllm.model_executor.model_loader.utils:initialize_model",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.layer_checks:initialize_model_on_cpu",
        leans_on=("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",),
        processes=("worker",),
        releases=SINCE_UPSTREAM,
        why="what a layer cannot do under DCP on CPUs is refused before its weights load",
        until=_NO_DCP_ON_CPUS,
    ),
    *(
        Patch(
            name="slot-mapping",
            target=f"{_TABLE}:BlockTable.compute_slot_mapping",
            how="wrap",
            replacement=f"vllm_dcp_hybrid.worker.cpu_slot_mapping:{replacement}",
            leans_on=(f"{_TABLE}:BlockTable.__init__",),
            processes=("worker",),
            releases=releases,
            why="stock refuses a sharded mapping on CPUs",
            until=_NO_DCP_ON_CPUS,
        )
        for replacement, releases in (
            ("compute_slot_mapping_split_blocks", ">=0.26,<0.32"),
            ("compute_slot_mapping_whole_blocks", ">=0.32"),
        )
    ),
    Patch(
        name="whole-block-copies",
        target="vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.block_copies:copy_kv_cache_blocks_inplace",
        processes=("worker",),
        releases=">=0.29",
        why="a hit that ends within a block gets a copy of its recurrent state's bytes only, so wrong answers",
        until="vLLM tells views of one address apart by their length",
    ),
    Patch(
        name="worker-report",
        target="vllm.v1.worker.gpu_worker:Worker.initialize_from_config",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.upstream_report:initialize_from_config",
        leans_on=UPSTREAM_WORKER,
        processes=("worker",),
        releases=SINCE_UPSTREAM,
        why="says whose block tables and attention serve here, after a look at the objects in use",
        until="vLLM logs the placement of its KV cache groups",
    ),
    Patch(
        name="fresh-recurrent-state",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.fresh_state:update_states",
        leans_on=(
            f"{_BACKENDS}.gdn_attn:GDNAttentionMetadataBuilder.build",
            f"{_BACKENDS}.utils:split_decodes_and_prefills",
        ),
        processes=("worker",),
        releases=">=0.26,<0.31",
        why="a prompt of one token starts from the state that the previous owner of its block left",
        until="0.31.0",
    ),
)
