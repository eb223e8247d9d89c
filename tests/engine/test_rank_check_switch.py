# SPDX-License-Identifier: Apache-2.0
"""The switch of the rank check: read where the configuration is built, bound where a worker is made."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dcp_hybrid import activation
from vllm_dcp_hybrid.engine import config
from vllm_dcp_hybrid.errors import BadSwitch

SWITCH = activation.CHECK_RANKS


def make_config(dcp: int = 2) -> Any:
    return SimpleNamespace(
        additional_config={},
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        model_config=SimpleNamespace(is_hybrid=True),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1", 30), ("on", 30), ("True", 30), ("0", 0), ("off", 0), ("", 0), ("2.5", 2.5), ("600", 600)],
)
def test_the_switch_is_a_word_or_a_number_of_seconds(
    value: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, value)
    assert activation.rank_check_limit_by_environment() == seconds


@pytest.mark.parametrize("value", ["maybe", "-3", "inf", "nan", "10s"])
def test_any_other_value_is_refused_in_one_sentence(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, value)
    with pytest.raises(BadSwitch, match=f"^{SWITCH}={value} means nothing; set it to 1, 0 or a number of seconds, or"):
        activation.rank_check_limit_by_environment()


def test_the_limit_travels_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "12")
    vllm_config = make_config()
    config.is_to_act(vllm_config)
    monkeypatch.delenv(SWITCH)
    assert activation.rank_check_limit_s(vllm_config) == 12


@pytest.mark.parametrize("dcp", [1, 2])
def test_off_or_idle_nothing_is_written_into_the_configuration(dcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1" if dcp == 1 else "0")
    vllm_config = make_config(dcp)
    config.is_to_act(vllm_config)
    assert vllm_config.additional_config == {}
    assert activation.rank_check_limit_s(vllm_config) == 0


class Worker:
    """As far as the check binds itself to one."""

    def init_device(self) -> str:
        return "device"

    def execute_model(self, output: object) -> object:
        return output


@pytest.fixture
def startup() -> Iterator[Any]:
    from vllm_dcp_hybrid.worker import startup

    yield startup
    startup.withdraw_attention_backends()


@pytest.mark.contract
@pytest.mark.parametrize("is_on", [True, False])
def test_a_workers_steps_are_bound_only_where_the_check_is_on(startup: Any, is_on: bool) -> None:
    worker, vllm_config = Worker(), make_config()
    if is_on:
        vllm_config.additional_config = {"dcp_hybrid": {"check_ranks_s": 5}}
    startup.begin(worker, vllm_config, startup._CPU)
    # Its peers are met in any case.
    assert set(vars(worker)) == ({"init_device", "execute_model"} if is_on else {"init_device"})
    assert startup.is_registered("CPU_ATTN")


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where this is the first import of vLLM
@pytest.mark.parametrize("is_on", [True, False])
def test_the_backend_is_the_one_with_a_record_only_where_the_check_is_on(startup: Any, is_on: bool) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm_config = make_config()
    if is_on:
        vllm_config.additional_config = {"dcp_hybrid": {"check_ranks_s": 5}}
    startup.begin(Worker(), vllm_config, startup._CPU)
    name = AttentionBackendEnum.CPU_ATTN.get_class().__name__
    assert name == ("RecordedCPUAttentionBackend" if is_on else "DCPCPUAttentionBackend")


def test_the_exchange_is_observed_only_after_the_check_has_begun() -> None:
    pytest.importorskip("torch")
    from vllm_dcp_hybrid.attention import transport

    group: Any = SimpleNamespace(world_size=2, rank_in_group=0, device_group=object())
    assert type(transport.transport_of(group)) is transport.ProcessGroupTransport
    transport.observe(lambda inner: ("observed", inner))  # type: ignore[arg-type, return-value]
    try:
        assert transport.transport_of(group)[0] == "observed"  # type: ignore[index]
    finally:
        transport.stop_observing()
    assert type(transport.transport_of(group)) is transport.ProcessGroupTransport
