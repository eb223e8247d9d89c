# SPDX-License-Identifier: Apache-2.0
"""Ranks that tell each other what they run, before a model is built: threads with a real TCP store."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from vllm_dcp_hybrid.errors import DCPHybridError, PeersDiffer, PeerSilent  # noqa: E402
from vllm_dcp_hybrid.worker import peer_seams  # noqa: E402
from vllm_dcp_hybrid.worker.peers import Peer, describe_ranks, first_difference, meet  # noqa: E402

HERE = Peer("here", "vllm-dcp-hybrid 0.1.0 on vLLM 0.25.1", {"--cp-kv-cache-interleave-size": "16"})
THERE = replace(HERE, host="there")
OLDER = replace(THERE, software="vllm-dcp-hybrid 0.0.9 on vLLM 0.25.1")
LIMIT_S = 20.0


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def meet_all(says: Mapping[int, Peer], num_ranks: int, limit_s: float = LIMIT_S) -> dict[int, Any]:
    """What each rank of `says` gets from `meet`: an answer or an error.  Two ranks are a node."""
    server = tcp_store()
    stores = {rank: server.clone() for rank in says}

    def one(rank: int) -> Any:
        try:
            return meet(stores[rank], rank, range(num_ranks), says[rank], limit_s=limit_s, num_ranks_per_node=2)
        except DCPHybridError as error:
            return error

    with ThreadPoolExecutor(len(says)) as pool:
        return dict(zip(says, pool.map(one, says), strict=True))


def test_ranks_that_run_the_same_go_on_and_know_each_other() -> None:
    says = {0: HERE, 1: HERE, 2: THERE, 3: THERE}
    assert meet_all(says, 4) == dict.fromkeys(range(4), says)


def test_case_27_another_version_stops_every_rank_and_is_named() -> None:
    """CASES 27: every process has the same fingerprint, on every node."""
    errors = meet_all({0: HERE, 1: HERE, 2: OLDER, 3: OLDER}, 4)
    assert {type(error) for error in errors.values()} == {PeersDiffer}
    (sentence,) = {str(error) for error in errors.values()}
    assert (
        "ranks 0, 1 (node 0, host here) run vllm-dcp-hybrid 0.1.0 on vLLM 0.25.1, and "
        "ranks 2, 3 (node 1, host there) run vllm-dcp-hybrid 0.0.9 on vLLM 0.25.1; install the same" in sentence
    )


def test_another_flag_stops_every_rank_and_is_named() -> None:
    errors = meet_all({0: HERE, 1: HERE, 2: THERE, 3: replace(THERE, settings={})}, 4)
    for error in errors.values():
        assert isinstance(error, PeersDiffer)
        assert "--cp-kv-cache-interleave-size differs: ranks 0, 1 (node 0, host here), rank 2 (node 1, " in str(error)
        assert "rank 3 (node 1, host there) has unknown" in str(error)


def test_ranks_that_say_nothing_are_named_once_the_limit_has_passed() -> None:
    started = time.monotonic()
    errors = meet_all({0: HERE, 1: HERE}, 4, limit_s=1)
    assert 1 <= time.monotonic() - started < 4
    for error in errors.values():
        assert isinstance(error, PeerSilent)
        assert "ranks 2, 3 (node 1) said nothing within 1 s" in str(error)
        assert "left out of VLLM_PLUGINS" in str(error)


def test_a_difference_is_told_rather_than_a_silence() -> None:
    errors = meet_all({0: HERE, 2: OLDER}, 4, limit_s=0.5)
    assert {type(error) for error in errors.values()} == {PeersDiffer}


def test_a_rank_that_comes_late_is_waited_for() -> None:
    server = tcp_store()
    threading.Timer(0.5, lambda: server.set("dcp_hybrid_peers/1/runs", THERE.to_json())).start()
    assert meet(server.clone(), 0, [0, 1], HERE, limit_s=LIMIT_S) == {0: HERE, 1: THERE}


def test_the_end_of_the_rank_that_holds_the_store_is_no_riddle() -> None:
    """Where rank 0 is the one with an older, stock or broken installation, the others lose the store."""
    servers = [tcp_store()]
    store = servers[0].clone()
    threading.Timer(0.3, servers.clear).start()
    with pytest.raises(PeerSilent, match=re.escape("rank 0 (node 0) has ended while the ranks compared")):
        meet(store, 1, [0, 1], HERE, limit_s=LIMIT_S, num_ranks_per_node=1)


@pytest.mark.parametrize(
    ("ranks", "num_ranks_per_node", "text"),
    [
        ([1], 0, "rank 1"),
        ([3, 1], 0, "ranks 1, 3"),
        ([1, 2, 3], 2, "rank 1 (node 0), ranks 2, 3 (node 1)"),
    ],
)
def test_places_are_named_as_far_as_they_are_known(ranks: Sequence[int], num_ranks_per_node: int, text: str) -> None:
    assert describe_ranks(ranks, {}, num_ranks_per_node) == text


def test_another_host_is_no_difference() -> None:
    assert first_difference({0: HERE, 1: THERE}, 1) is None


def test_what_a_rank_says_survives_the_store_and_versions_that_say_more() -> None:
    assert Peer.from_json(HERE.to_json()) == HERE
    assert Peer.from_json('{"host": "there", "software": "x", "torch": "2.13"}') == Peer("there", "x", {})


def test_a_worker_meets_the_others_after_its_device_is_there_and_returns_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(peer_seams, "meet_peers", lambda config: done.append(f"meet for {config.name}"))

    class Worker:
        def init_device(self, device: str) -> str:
            done.append(device)
            return "ready"

    worker, other = Worker(), Worker()
    peer_seams.install(worker, SimpleNamespace(name="this engine"))
    assert worker.init_device("cpu") == "ready"
    assert done == ["cpu", "meet for this engine"]
    assert vars(other) == {}


@pytest.mark.contract
def test_a_rank_says_what_its_own_command_line_gave_it(scenes: Any) -> None:
    config = scenes.engine_config(dcp=2)
    peer = peer_seams.describe(config)
    assert re.fullmatch(r"vllm-dcp-hybrid \S+ on vLLM \S+ \(\d+ patches, fingerprint [0-9a-f]+\)", peer.software)
    assert peer.settings == {
        "-dcp": "2",
        "--cp-kv-cache-interleave-size": str(config.parallel_config.cp_kv_cache_interleave_size),
        "--dcp-comm-backend": "ag_rs",
        "DCP_HYBRID_CHECK_RANKS": "0",
    }
