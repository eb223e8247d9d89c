# SPDX-License-Identifier: Apache-2.0
"""What is refused while the configuration is built, one sentence each."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid.engine import checks
from vllm_dcp_hybrid.engine.checks import check_config, check_shared_memory, check_world_size
from vllm_dcp_hybrid.errors import IllegalWorldSize, SharedMemoryTooSmall, UnsupportedFeature


def model(num_query_heads: int, num_kv_heads: int, *, use_mla: bool = False) -> Any:
    return SimpleNamespace(
        use_mla=use_mla,
        get_total_num_kv_heads=lambda: num_kv_heads,
        model_arch_config=SimpleNamespace(total_num_attention_heads=num_query_heads),
    )


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "tp", "dcp", "why", "remedy"),
    [
        (16, 2, 8, 3, "3 does not divide 8", "use -dcp 4."),
        (16, 2, 8, 8, "each of its 2 KV heads is stored on 4 rank", "use -dcp 4."),
        (12, 2, 8, 4, "the 6 query heads that share a KV head cannot be divided by 4", "use -dcp 2."),
        (16, 8, 4, 2, "each of its 8 KV heads is stored on 1 rank", "use -dcp 1, or -tp 16 or more."),
        (8, 4, 4, 2, "each of its 4 KV heads is stored on 1 rank", "use -dcp 1, or -tp 8 or more."),
        (9, 1, 3, 2, "2 does not divide 3", "use -dcp 3."),
        # Ranks 2 and 3 of 6 would be one group and hold unequal KV heads; stock allows it.
        (12, 2, 6, 2, "2 does not divide the 3 ranks that store the same KV head", "use -dcp 3."),
        (7, 1, 3, 2, "2 does not divide 3", "Use -dcp 1."),
    ],
)
def test_case_07_an_illegal_size_names_the_rule_and_the_largest_legal_size(
    query_heads: int, kv_heads: int, tp: int, dcp: int, why: str, remedy: str
) -> None:
    """CASES 7."""
    with pytest.raises(IllegalWorldSize) as caught:
        check_world_size(model(query_heads, kv_heads), tp_size=tp, dcp_size=dcp)
    message = str(caught.value)
    assert message.startswith(f"Decode Context Parallelism of size {dcp} is not possible")
    assert f"at tensor parallel size {tp}: {why}" in message
    assert message.endswith(remedy)


def test_case_07_latent_kv_may_be_split_over_the_whole_tensor_parallel_group() -> None:
    """CASES 7, for MLA: whatever the head counts."""
    for dcp in (1, 2, 4, 8):
        check_world_size(model(128, 128, use_mla=True), tp_size=8, dcp_size=dcp)
    with pytest.raises(IllegalWorldSize, match=r"5 does not divide 8.*use -dcp 8"):
        check_world_size(model(128, 128, use_mla=True), tp_size=8, dcp_size=5)


@pytest.mark.contract
def test_case_07_what_stock_refuses_is_refused_and_what_is_named_is_legal_for_stock(vllm_engine: Any) -> None:
    """CASES 7: against `ModelConfig.verify_with_parallel_config` and the rule of `ParallelConfig`, over all sizes.

    One rule is ours: a DCP group is a run of neighbouring ranks, all of which hold the same KV head.
    """

    def stock_allows(shape: Any, tp: int, dcp: int) -> bool:
        parallel = SimpleNamespace(
            tensor_parallel_size=tp,
            enable_expert_parallel=False,
            pipeline_parallel_size=1,
            decode_context_parallel_size=dcp,
            data_parallel_size=1,
            enable_hc_sp=False,
        )
        try:
            vllm_engine.config.ModelConfig.verify_with_parallel_config(shape, parallel)
        except (AssertionError, ValueError):
            return False
        return tp % dcp == 0

    num_refused = 0
    for tp in (1, 2, 3, 4, 6, 8, 16):
        for kv_heads in (1, 2, 3, 4, 8):
            for query_heads in (tp * kv_heads, 2 * tp * kv_heads, 3 * tp * kv_heads):
                for use_mla in (False, True):
                    shape = model(query_heads, kv_heads, use_mla=use_mla)
                    shape.multimodal_config = None
                    legal = [
                        dcp
                        for dcp in range(1, tp + 1)
                        if stock_allows(shape, tp, dcp) and (use_mla or dcp == 1 or tp // kv_heads % dcp == 0)
                    ]
                    for dcp in range(2, tp + 2):
                        if dcp in legal:
                            check_world_size(shape, tp_size=tp, dcp_size=dcp)
                            continue
                        with pytest.raises(IllegalWorldSize, match=rf"-dcp {max(legal)}\b"):
                            check_world_size(shape, tp_size=tp, dcp_size=dcp)
                        num_refused += 1
    assert num_refused > 100


def config(**changes: Any) -> Any:
    """A configuration that asks for nothing special, and dotted changes to it."""
    values = SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, enable_dbo=False, world_size=2),
        kv_transfer_config=None,
        use_v2_model_runner=False,
        speculative_config=None,
        model_config=SimpleNamespace(enable_return_routed_experts=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    for path, value in changes.items():
        *holders, name = path.split("__")
        holder = values
        for part in holders:
            holder = getattr(holder, part)
        setattr(holder, name, value)
    return values


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"parallel_config__prefill_context_parallel_size": 2},
        "Prefill context parallelism",
        "drop --prefill-context-parallel-size",
    ),
    ({"kv_transfer_config": object()}, "A KV connector", "drop the connector or use -dcp 1"),
    ({"use_v2_model_runner": True}, "The V2 model runner", "unset VLLM_USE_V2_MODEL_RUNNER"),
    ({"speculative_config": object()}, "Speculative decoding", "drop --speculative-config or use -dcp 1"),
    (
        {"model_config__enable_return_routed_experts": True},
        "Returning routed experts",
        "drop --enable-return-routed-experts",
    ),
    ({"parallel_config__enable_dbo": True}, "Dual-batch overlap", "drop --enable-dbo and --ubatch-size"),
    (
        {"device_config__device_type": "cpu", "cache_config__cache_dtype": "fp8_e5m2"},
        "A quantised KV cache on a CPU",
        "use --kv-cache-dtype auto",
    ),
]


def test_an_ordinary_configuration_is_not_refused() -> None:
    check_config(config())
    check_config(config(device_config__device_type="cpu"))
    check_config(config(cache_config__cache_dtype="fp8"))


@pytest.mark.parametrize(("changes", "feature", "remedy"), REFUSALS, ids=[feature for _, feature, _ in REFUSALS])
def test_an_unsupported_feature_says_what_why_and_what_to_do(
    changes: dict[str, Any], feature: str, remedy: str
) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        check_config(config(**changes))
    message = str(caught.value)
    assert message.startswith(feature)
    where = "on CPUs" if "CPU" in feature else "for hybrid models"
    assert f"is not supported together with Decode Context Parallelism {where} because " in message
    assert message.endswith(f"; {remedy}.")


def test_the_table_above_covers_every_feature_that_is_refused() -> None:
    refused = [feature for feature, *_ in checks.unsupported(config())]
    assert len(refused) == len(REFUSALS)
    assert all(any(name.startswith(feature) for name in refused) for _, feature, _ in REFUSALS)


@pytest.mark.parametrize(("num_ranks", "needed_mib"), [(1, 36), (2, 40), (8, 64)])
def test_case_31_a_small_dev_shm_says_how_much_it_has_and_how_much_is_needed(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, needed_mib: int
) -> None:
    """CASES 31: CPU ranks exchange data through it; containers have 64 MiB unless told otherwise."""

    def pretend(free_mib: int) -> None:
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20))

    pretend(needed_mib)
    check_shared_memory(num_ranks)
    pretend(needed_mib - 1)
    message = f"^/dev/shm has {needed_mib - 1} MiB free and {num_ranks} CPU ranks need {needed_mib} MiB .*--shm-size"
    with pytest.raises(SharedMemoryTooSmall, match=message):
        check_shared_memory(num_ranks)
    # GPU ranks exchange nothing that way.
    check_config(config())
    with pytest.raises(SharedMemoryTooSmall):
        check_config(config(device_config__device_type="cpu", parallel_config__world_size=num_ranks))


def test_a_refusal_crosses_process_boundaries() -> None:
    """Errors of workers are pickled on their way to the API server."""
    error = UnsupportedFeature(feature="F", where="on Mars", why="W", remedy="R")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UnsupportedFeature
    assert str(copy) == str(error)
    assert copy.facts == error.facts
