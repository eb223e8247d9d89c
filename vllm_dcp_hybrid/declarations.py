# SPDX-License-Identifier: Apache-2.0
"""Every change to vLLM, in the order in which it is applied: the table of contents of this package.

The format and the rules are in :mod:`vllm_dcp_hybrid.patching`; what each release looks like is in ``patches/``.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_dcp_hybrid import upstream_declarations
from vllm_dcp_hybrid.patching import Patch, is_among

_UPSTREAM = "0.26.0"  # vLLM pull request 40996
# A specifier only says which releases a patch is written for: nothing is applied to one that has no file in patches/.
_BEFORE_UPSTREAM = ">=0.20.2,<0.26"
_ALL = ">=0.20.2"
_ARGS = "vllm.engine.arg_utils"
_SPECS = "vllm.v1.kv_cache_interface"
_TABLE = "vllm.v1.worker.block_table"
_CP_UTILS = "vllm.v1.worker.cp_utils"
_UPSTREAM_CONFIG = "vllm_dcp_hybrid.engine.upstream_config"


@dataclass(frozen=True)
class Era:
    """What the plugin is for in a range of releases.

    Args:
        name: for messages.
        releases: PEP 440 specifier.
        does: what the plugin does there.
        acts_on: what it may refuse.
        refuses: the functions that yield what a configuration must not ask for.
    """

    name: str
    releases: str
    does: str
    acts_on: str
    refuses: tuple[str, ...]


ERAS: tuple[Era, ...] = (
    Era(
        name="before upstream's hybrid DCP",
        releases=_BEFORE_UPSTREAM,
        does="the whole feature: hybrid models under DCP, on CUDA and on CPUs",
        acts_on="hybrid models under DCP",
        refuses=("vllm_dcp_hybrid.engine.checks:unsupported",),
    ),
    Era(
        name="upstream's hybrid DCP without its prefix hits",
        releases=">=0.26,<0.29",
        does="upstream's own path stays; the plugin keeps the prefix hits that it loses, and adds DCP on CPUs",
        acts_on="DCP on CPUs or on the V2 model runner",
        refuses=(f"{_UPSTREAM_CONFIG}:unsupported_with_short_rows", f"{_UPSTREAM_CONFIG}:unsupported_on_cpu"),
    ),
    Era(
        name="upstream's hybrid DCP",
        releases=">=0.29",
        does="upstream's own path stays; the plugin copies whole what a hit shares in part, and adds DCP on CPUs",
        acts_on="DCP on CPUs",
        refuses=(f"{_UPSTREAM_CONFIG}:unsupported_on_cpu",),
    ),
)


def era_of(version: str) -> Era | None:
    """The era of release `version`; None where no patch is written for it."""
    return next((era for era in ERAS if is_among(version, era.releases)), None)


# Applied first and on their own, so that `--enable-plugin` can say why the rest could not be applied.
ENTRY_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cli-enable-plugin",
        target=f"{_ARGS}:EngineArgs.add_cli_args",
        how="wrap",
        replacement="vllm_dcp_hybrid.engine.cli_flag:add_cli_args",
        leans_on=(f"{_ARGS}:AsyncEngineArgs.add_cli_args",),
        processes=("api_server",),
        releases=_ALL,
        why="stock vLLM has no flag that demands a plugin, and no hook by which a general plugin could add one",
        until="vLLM lets general plugins add command line arguments",
    ),
    Patch(
        name="cli-carry-demand",
        target=f"{_ARGS}:EngineArgs.from_cli_args",
        how="wrap",
        replacement="vllm_dcp_hybrid.engine.cli_flag:from_cli_args",
        processes=("api_server",),
        releases=_ALL,
        why="arguments that are no field of EngineArgs are dropped; the demand travels in additional_config",
        until="vLLM lets general plugins add command line arguments",
    ),
    Patch(
        name="config-switches",
        target=f"{_ARGS}:EngineArgs.create_engine_config",
        how="wrap",
        replacement="vllm_dcp_hybrid.engine.config:create_engine_config",
        processes=("api_server",),
        releases=_BEFORE_UPSTREAM,
        why="the switches are read, and unsupported features refused, where the configuration is built",
        until="vLLM offers general plugins a hook on the finished configuration",
    ),
    *upstream_declarations.ENTRY_PATCHES,
)

FEATURE_PATCHES: tuple[Patch, ...] = (
    # The API process
    Patch(
        name="config-world-size",
        target=f"{_ARGS}:EngineArgs.create_model_config",
        how="wrap",
        replacement="vllm_dcp_hybrid.engine.config:create_model_config",
        leans_on=("vllm.config.model:ModelConfig.verify_with_parallel_config",),
        processes=("api_server",),
        releases=_BEFORE_UPSTREAM,
        why="stock refuses illegal sizes with an assertion that does not name a legal one (vllm#51429)",
        until="vLLM names the largest legal DCP size",
    ),
    # The engine core
    Patch(
        name="resolve-block-sizes",
        target="vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
        how="wrap",
        replacement="vllm_dcp_hybrid.core.block_sizes:resolve_kv_cache_block_sizes",
        leans_on=(f"{_SPECS}:KVCacheGroupSpec", f"{_SPECS}:KVCacheConfig"),
        processes=("engine_core",),
        releases=_BEFORE_UPSTREAM,
        why="stock refuses several groups under context parallelism; sharded groups count effective blocks",
        until=_UPSTREAM,
    ),
    Patch(
        name="kv-cache-coordinator",
        target="vllm.v1.core.kv_cache_coordinator:get_kv_cache_coordinator",
        how="wrap",
        replacement="vllm_dcp_hybrid.core.coordinator:get_kv_cache_coordinator",
        leans_on=(
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinatorNoPrefixCache",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.__init__",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager",
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
            "vllm.v1.core.single_type_kv_cache_manager:MambaManager",
            "vllm.v1.core.kv_cache_utils:BlockHashListWithBlockSize",
        ),
        processes=("engine_core",),
        releases=_BEFORE_UPSTREAM,
        why="stock asserts DCP 1 with prefix caching, and scales recurrent groups without it (vllm#35181)",
        until=_UPSTREAM,
    ),
    Patch(
        name="prefill-chunk-ends",
        target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        how="wrap",
        replacement="vllm_dcp_hybrid.core.prefill_split:mamba_block_aligned_split",
        leans_on=("vllm.v1.core.sched.scheduler:Scheduler.__init__",),
        processes=("engine_core",),
        releases=_BEFORE_UPSTREAM,
        why="chunks end on one rank's block, where no prefix hit can end; stock 0.26 - 0.28 lose their hits to this",
        until="0.29.0",
    ),
    Patch(
        name="cpu-cores-per-rank",
        target="vllm.utils.ompmultiprocessing:OMPProcessManager.__init__",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.cpu_binding:omp_process_manager_init",
        leans_on=(
            "vllm.utils.ompmultiprocessing:OMPProcessManager._parse_omp_threads_bind_env",
            "vllm.utils.cpu_resource_utils:get_allowed_cpu_list",
            "vllm.utils.cpu_resource_utils:get_visible_memory_node",
            "vllm.utils.cpu_resource_utils:LogicalCPUInfo",
        ),
        processes=("engine_core",),
        releases=_ALL,
        why="stock's automatic binding stops where there are fewer NUMA nodes than ranks",
        until="vLLM divides one NUMA node's cores among ranks",
    ),
    Patch(
        name="cpu-page-alignment",
        target="vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.cpu_block_size:update_block_size_for_backend",
        leans_on=(
            "vllm.platforms.interface:Platform._find_non_ssm_backend",
            "vllm.platforms.interface:Platform._align_hybrid_block_size",
        ),
        processes=("engine_core", "worker"),
        releases=">=0.20.2,<0.21",
        why="on CPUs stock does not make attention and recurrent pages equal, so no hybrid has a KV cache",
        until="0.21.0",
    ),
    # The workers
    *(
        Patch(
            name="worker-backends",
            target="vllm.v1.worker.worker_base:WorkerBase.__init__",
            how="wrap",
            replacement=f"vllm_dcp_hybrid.worker.startup:{replacement}",
            leans_on=(
                "vllm.v1.attention.backends.registry:register_backend",
                "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
                "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
                "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
                "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
                "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata",
                "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
                "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
                "vllm.v1.attention.ops.merge_attn_states:merge_attn_states",
                "vllm.v1.attention.backend:AttentionImplBase.__new__",
                "vllm.v1.attention.backend:CommonAttentionMetadata",
                "vllm.model_executor.layers.attention.attention:unified_kv_cache_update",
            ),
            processes=("worker",),
            releases=releases,
            why="attention backends are registered where the configuration is known, so that a dormant plugin adds "
            "none",
            until="vLLM's CPU backend returns the LSE, and its FlashAttention backend decodes in one call",
        )
        for replacement, releases in (
            # FlashAttention's cache begins with keys and values, or with blocks.
            ("worker_base_init_kv_first", ">=0.20.2,<0.23"),
            ("worker_base_init", ">=0.23,<0.26"),
        )
    ),
    Patch(
        name="layer-checks",
        target="vllm.model_executor.model_loader.utils:initialize_model",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.layer_checks:initialize_model",
        leans_on=("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",),
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="what a layer cannot do under DCP is refused between building the model and loading its weights",
        until="vLLM checks layers before it loads weights",
    ),
    Patch(
        name="block-tables-per-group",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.may_reinitialize_input_batch",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.block_table:may_reinitialize_input_batch",
        leans_on=("vllm.v1.worker.gpu_input_batch:InputBatch.__init__",),
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="rows of recurrent groups are N times too short, and the interleave is lost (vllm#50493)",
        until=_UPSTREAM,
    ),
    Patch(
        name="block-table-geometry",
        target=f"{_TABLE}:MultiGroupBlockTable.__init__",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.block_table:multi_group_block_table_init",
        leans_on=(f"{_TABLE}:BlockTable.__init__",),
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="each group's table follows its own geometry instead of one DCP size for all",
        until=_UPSTREAM,
    ),
    Patch(
        name="slot-mapping",
        target=f"{_TABLE}:BlockTable.compute_slot_mapping",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.block_table:compute_slot_mapping",
        leans_on=(f"{_TABLE}:_compute_slot_mapping_kernel",),
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="the interleave runs over allocation blocks (vllm#51031), recurrent groups have no slots, and stock "
        "refuses a sharded mapping on CPUs",
        until="vLLM maps sharded slots on CPUs; on GPUs 0.26.0",
    ),
    Patch(
        name="fresh-recurrent-state",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.fresh_state:update_states",
        leans_on=(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
            "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
        ),
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="a prompt of one token starts from the state that the previous owner of its block left",
        until="GDN's metadata tells a prompt of one token from a decode row",
    ),
    Patch(
        name="cpu-state-copies",
        target="vllm.v1.worker.mamba_utils:batch_memcpy",
        how="wrap",
        replacement="vllm_dcp_hybrid.worker.cpu_state_copies:batch_memcpy",
        leans_on=("vllm.v1.worker.mamba_utils:do_mamba_copy_block",),
        processes=("worker",),
        releases=">=0.20.2,<0.25",
        why="stock copies recurrent states in Triton only, so hybrids have no prefix caching on CPUs",
        until="0.25.0",
    ),
    # Names of vLLM 0.26's contract
    Patch(
        name="word-max-num-blocks-per-req",
        target=f"{_SPECS}:KVCacheSpec.max_num_blocks_per_req",
        how="add",
        replacement="vllm_dcp_hybrid.core.upstream_words:max_num_blocks_per_req",
        processes=("engine_core", "worker"),
        releases=_BEFORE_UPSTREAM,
        why="code written for 0.26 asks a spec for the width of its rows",
        until=_UPSTREAM,
    ),
    Patch(
        name="word-slot-mapping-mode",
        target=f"{_TABLE}:SlotMappingMode",
        how="add",
        replacement="vllm_dcp_hybrid.worker.block_table:SlotMappingMode",
        processes=("worker",),
        releases=_BEFORE_UPSTREAM,
        why="code written for 0.26 names a group's slot mapping",
        until=_UPSTREAM,
    ),
    *(
        Patch(
            name=f"word-{name.replace('_', '-')}",
            target=f"{_CP_UTILS}:{name}",
            how="add",
            replacement=f"vllm_dcp_hybrid.attention.upstream_contract:{name}",
            processes=("worker",),
            releases=_BEFORE_UPSTREAM,
            why="a function of 0.26's contract, under its name there",
            until=_UPSTREAM,
        )
        for name in (
            "should_skip_dcp_context_attention",
            "split_dcp_context_queries",
            "should_split_fa2_dcp_context_attention",
            "get_dcp_dummy_context_len",
        )
    ),
    *upstream_declarations.FEATURE_PATCHES,
)

ALL_PATCHES: tuple[Patch, ...] = ENTRY_PATCHES + FEATURE_PATCHES
