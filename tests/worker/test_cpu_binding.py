# SPDX-License-Identifier: Apache-2.0
"""Cores for CPU ranks on a machine with fewer NUMA nodes than ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_hybrid.worker.cpu_binding import binding_for, divide_cores, omp_process_manager_init

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("cores", "num_ranks", "expected"),
    [
        ([0, 1, 2, 3], 2, ["0,1", "2,3"]),
        ([0, 1, 2, 3, 4], 2, ["0,1", "2,3"]),
        ([0, 1], 4, ["0", "1", "0", "1"]),
        ([5], 3, ["5", "5", "5"]),
        ([4, 8], 2, ["4", "8"]),
    ],
)
def test_cores_are_divided_or_shared_in_turn(cores: list[int], num_ranks: int, expected: list[str]) -> None:
    assert divide_cores(cores, num_ranks) == expected


@given(num_cores=st.integers(1, 64), num_ranks=st.integers(1, 16))
def test_every_rank_has_as_many_cores_as_any_other(num_cores: int, num_ranks: int) -> None:
    lists = [text.split(",") for text in divide_cores(range(num_cores), num_ranks)]
    assert len(lists) == num_ranks
    assert len({len(cores) for cores in lists}) == 1
    given_out = [core for cores in lists for core in cores]
    if num_cores >= num_ranks:
        assert len(set(given_out)) == len(given_out)
    else:
        # Nobody's core has two ranks more than another's.
        counts = [given_out.count(str(core)) for core in range(num_cores)]
        assert max(counts) - min(counts) <= 1


def config(num_ranks: int, *, dcp: int = 2, local_dp_rank: int | None = None) -> Any:
    return SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp, local_world_size=num_ranks, data_parallel_rank_local=local_dp_rank
        ),
        model_config=SimpleNamespace(is_hybrid=True),
    )


@pytest.fixture
def machine(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend to be a CPU machine: (NUMA nodes, physical cores per node, threads per core)."""
    import vllm.platforms
    from vllm.utils import cpu_resource_utils

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_CPU_SIM_MULTI_NUMA", raising=False)

    def pretend(num_nodes: int, num_cores: int, num_threads: int = 2, *, is_cpu: bool = True) -> None:
        cpus = [
            SimpleNamespace(id=thread * num_nodes * num_cores + core, physical_core=core, numa_node=core // num_cores)
            for thread in range(num_threads)
            for core in range(num_nodes * num_cores)
        ]
        monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
        monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: list(range(num_nodes)))
        monkeypatch.setattr(vllm.platforms.current_platform, "is_cpu", lambda: is_cpu, raising=False)

    return pretend


@pytest.mark.contract
class TestBinding:
    def test_the_physical_cores_of_one_node_are_divided(self, machine: Callable[..., None]) -> None:
        machine(1, 4)
        # One logical CPU per physical core: the last of each, as stock takes.
        assert binding_for(config(2)) == "4,5|6,7"

    def test_as_many_nodes_as_ranks_are_stocks_business(self, machine: Callable[..., None]) -> None:
        machine(2, 4)
        assert binding_for(config(2)) is None
        assert binding_for(config(4)) == "8,9|10,11|12,13|14,15"

    def test_case_31_four_ranks_are_two_dcp_groups_of_two(self, machine: Callable[..., None]) -> None:
        """CASES 31: cores are divided over all ranks of the TP group, whatever its DCP sub-groups are."""
        machine(1, 8, 1)
        assert binding_for(config(4, dcp=2)) == binding_for(config(4, dcp=4)) == "0,1|2,3|4,5|6,7"

    def test_ranks_of_data_parallel_engines_get_cores_of_their_own(self, machine: Callable[..., None]) -> None:
        """Stock takes the part of the list that belongs to the engine's own local rank."""
        machine(1, 8, 1)
        first = str(binding_for(config(2, local_dp_rank=0))).split("|")
        second = str(binding_for(config(2, local_dp_rank=1))).split("|")
        assert (len(first), len(second)) == (2, 4)
        assert second[2:] == ["4,5", "6,7"]

    @pytest.mark.parametrize(
        ("name", "value"), [(VARIABLE, "0-1|2-3"), (VARIABLE, "nobind"), ("VLLM_CPU_SIM_MULTI_NUMA", "1")]
    )
    def test_what_the_user_says_is_kept(
        self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        machine(1, 4)
        monkeypatch.setenv(name, value)
        assert binding_for(config(2)) is None

    def test_idle_or_on_a_gpu_nothing_is_bound(self, machine: Callable[..., None]) -> None:
        machine(1, 4)
        assert binding_for(config(2, dcp=1)) is None
        machine(1, 4, is_cpu=False)
        assert binding_for(config(2)) is None

    @pytest.mark.parametrize("before", [None, "auto"])
    def test_stock_parses_the_list_and_the_environment_is_put_back(
        self, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, before: str | None
    ) -> None:
        machine(1, 4, 1)
        if before is not None:
            monkeypatch.setenv(VARIABLE, before)
        seen = []
        omp_process_manager_init(lambda _: seen.append(os.environ[VARIABLE]), object(), (config(2),), {})
        assert seen == ["0,1|2,3"]
        assert os.environ.get(VARIABLE) == before

    def test_the_environment_is_put_back_when_stock_fails(self, machine: Callable[..., None]) -> None:
        machine(1, 4, 1)

        def original(_: Any) -> None:
            raise AssertionError("stock")

        with pytest.raises(AssertionError, match="stock"):
            omp_process_manager_init(original, object(), (config(2),), {})
        assert VARIABLE not in os.environ

    def test_stocks_own_class_ends_up_with_these_cores(self, scenes: Any, machine: Callable[..., None]) -> None:
        """Through the patched `OMPProcessManager`, which refuses a list of another length."""
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        machine(1, 4, 1)
        vllm_config = scenes.engine_config(dcp=2)
        vllm_config.parallel_config.data_parallel_rank_local = None
        manager = OMPProcessManager(vllm_config)
        assert manager.cpu_lists == [[0], [1], [2], [3]]
