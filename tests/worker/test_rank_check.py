# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes with gloo: one takes another way, and all end with the same message instead of a hang.

Run as a script, this file plays all of `STEPS` at once, and forks every rank from one import of torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import vllm_dcp_hybrid  # noqa: E402
from vllm_dcp_hybrid.errors import RanksDisagree  # noqa: E402
from vllm_dcp_hybrid.worker.rank_check import EXIT_STATUS, RankChecker  # noqa: E402

LIMIT_S = 3.0
NUM_RANKS = 3


def gather(checker: RankChecker, length: int = 4) -> None:
    """A collective that is written down, as the seams do."""
    piece = torch.zeros(length)
    with checker.collective(f"all_gather of [{length}]"):
        dist.all_gather_into_tensor(torch.zeros(NUM_RANKS * length), piece)


def agree(rank: int, checker: RankChecker) -> None:
    gather(checker)


def skip_a_collective(rank: int, checker: RankChecker) -> None:
    if rank != 1:
        gather(checker)


def swap_two(rank: int, checker: RankChecker) -> None:
    """Both finish, for the shapes are equal: only the record tells."""
    for name in ("first", "second") if rank != 2 else ("second", "first"):
        checker.note(name)
        gather(checker)


def take_another_branch(rank: int, checker: RankChecker) -> None:
    checker.note("decode" if rank == 0 else "context")
    gather(checker)


def do_one_more(rank: int, checker: RankChecker) -> None:
    gather(checker)
    if rank == 0:
        gather(checker, length=7)


def send_more(rank: int, checker: RankChecker) -> None:
    """Gloo ends a rank that receives more than it expects."""
    gather(checker, length=70_000 if rank == 0 else 4)


def raise_an_error(rank: int, checker: RankChecker) -> None:
    if rank == 2:
        raise KeyError("no such block")
    gather(checker)


def be_slow(rank: int, checker: RankChecker) -> None:
    """Longer than the limit, but on the same way."""
    if rank == 1:
        time.sleep(2.5 * LIMIT_S)
    gather(checker)


Step = Callable[[int, RankChecker], None]
STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        agree,
        skip_a_collective,
        swap_two,
        take_another_branch,
        do_one_more,
        send_more,
        raise_an_error,
        be_slow,
    )
}


# Without lockstep ranks compare at the end of a step only, and one that hangs needs the thread beside it.
PLAYS = {f"{name} {how}": (name, how) for name in STEPS for how in ("lockstep", "loose")}
del PLAYS["send_more loose"]


def be_rank(rank: int, port: int, step: Step, is_lockstep: bool) -> None:
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    checker = RankChecker(store, rank, range(NUM_RANKS), LIMIT_S, is_lockstep)
    try:
        for number in range(7):
            with checker.whole_step():
                (step if number == 3 else agree)(rank, checker)
    except RanksDisagree as error:
        print(error, flush=True)
        os._exit(3)
    print("agreed", checker.step, store.num_keys() if rank == 0 else "", flush=True)
    dist.barrier()


Results = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By step: (exit status, output) of each rank."""
    directory = tmp_path_factory.mktemp("ranks")
    root = str(Path(vllm_dcp_hybrid.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, str(directory)], check=False, env=env, timeout=240)
    assert done.returncode == 0
    statuses = json.loads((directory / "statuses.json").read_text())
    return {
        play: [(status, (directory / f"{play}-{rank}").read_text()) for rank, status in enumerate(statuses[play])]
        for play in PLAYS
    }


def play_all(directory: Path) -> None:
    """Fork the ranks of every step, and write down how they ended."""
    children: dict[int, tuple[str, int]] = {}
    for play, (name, how) in PLAYS.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                output = os.open(directory / f"{play}-{rank}", os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 1)
                os.dup2(output, 2)
                signal.alarm(180)  # a hang ends as well
                be_rank(rank, port, STEPS[name], how == "lockstep")
                os._exit(0)
            children[child] = play, rank
    statuses: dict[str, list[int]] = {play: [-1] * NUM_RANKS for play in PLAYS}
    for _ in range(len(children)):
        child, status = os.wait()
        play, rank = children[child]
        statuses[play][rank] = os.waitstatus_to_exitcode(status)
    (directory / "statuses.json").write_text(json.dumps(statuses))


each_way = pytest.mark.parametrize("how", ["lockstep", "loose"])


@each_way
def test_ranks_that_agree_run_on(results: Results, how: str) -> None:
    assert [status for status, _ in results[f"agree {how}"]] == [0, 0, 0], results[f"agree {how}"]
    assert all("agreed 7" in output for _, output in results[f"agree {how}"])


@each_way
def test_the_store_does_not_fill_up(results: Results, how: str) -> None:
    """Of each rank what the last two steps wrote, and what the process group put there."""
    (num_keys,) = re.findall(r"agreed 7 (\d+)", results[f"agree {how}"][0][1])
    assert int(num_keys) < 40


@each_way
@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("skip_a_collective", "step 3, call 1. ranks 0, 2: all_gather of [4]; rank 1: the end of the step."),
        ("swap_two", "step 3, call 1. ranks 0, 1: first; rank 2: second."),
        ("take_another_branch", "step 3, call 1. rank 0: decode; ranks 1, 2: context."),
        (
            "do_one_more",
            "step 3, call 2, after all_gather of [4]. rank 0: all_gather of [7]; ranks 1, 2: the end of the step.",
        ),
        ("send_more", "step 3, call 1. rank 0: all_gather of [70000]; ranks 1, 2: all_gather of [4]."),
        (
            "raise_an_error",
            "step 3, call 1. ranks 0, 1: all_gather of [4]; rank 2: an error, KeyError: 'no such block'.",
        ),
    ],
)
def test_case_21_every_rank_ends_with_the_step_the_ranks_and_the_first_difference(
    results: Results, step: str, message: str, how: str
) -> None:
    """CASES 21: a rank that skips a collective is a hang elsewhere."""
    if f"{step} {how}" not in PLAYS:
        pytest.skip("gloo ends a rank before it can tell")
    for status, output in results[f"{step} {how}"]:
        # In lockstep no rank enters what it could not leave.
        assert status == 3 if how == "lockstep" else status in (3, EXIT_STATUS), output
        assert f"the ranks disagree in {message}" in output


@each_way
def test_a_rank_that_is_slow_is_waited_for_and_talked_about(results: Results, how: str) -> None:
    ranks = results[f"be_slow {how}"]
    assert [status for status, _ in ranks] == [0, 0, 0], ranks
    assert any("rank check: rank 0 has waited" in output for _, output in ranks)


if __name__ == "__main__":
    play_all(Path(sys.argv[1]))
