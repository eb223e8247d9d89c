# SPDX-License-Identifier: Apache-2.0
"""What is written down of a worker's collectives and branches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_dcp_hybrid.attention.plan import make_plan  # noqa: E402
from vllm_dcp_hybrid.attention.recorded_transport import RecordedTransport  # noqa: E402
from vllm_dcp_hybrid.placement import local_len  # noqa: E402
from vllm_dcp_hybrid.worker import rank_check_seams  # noqa: E402
from vllm_dcp_hybrid.worker.rank_records import describe_branch  # noqa: E402


class Listening:
    """A checker that remembers what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.step = 0

    def note(self, call: str) -> None:
        self.calls.append(call)

    @contextmanager
    def collective(self, call: str) -> Iterator[None]:
        self.calls.append(call)
        yield

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        yield
        self.end_step()

    def end_step(self) -> None:
        self.calls.append(f"end of step {self.step}")
        self.step += 1


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Listening:
    listening = Listening()
    monkeypatch.setattr(rank_check_seams, "_checker", listening)
    return listening


class Communicator:
    def all_reduce(self, input_: Any) -> Any:
        return input_ * 2

    def all_gather(self, input_: Any, dim: int = -1) -> Any:
        return torch.cat([input_, input_], dim=dim)


def test_a_groups_collectives_are_written_down_and_do_what_they_did(checker: Listening) -> None:
    communicator = Communicator()
    rank_check_seams.record_collectives("tp", communicator)
    assert communicator.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    assert communicator.all_gather(input_=torch.ones(2, 2, dtype=torch.bfloat16), dim=0).shape == (4, 2)
    assert checker.calls == [
        "all_reduce in the TP group of [3] float32",
        "all_gather in the TP group of [2, 2] bfloat16",
    ]


def test_other_communicators_keep_their_methods(checker: Listening) -> None:
    rank_check_seams.record_collectives("tp", Communicator())
    Communicator().all_reduce(torch.ones(3))
    assert checker.calls == []


def test_the_exchange_is_written_down_with_what_goes_in(checker: Listening) -> None:
    sent: list[str] = []

    class Inner:
        def all_gather(self, into: Any, piece: Any) -> None:
            sent.append("all_gather")

        def reduce_scatter(self, into: Any, pieces: Any) -> None:
            sent.append("reduce_scatter")

        def swap(self, into: Any, pieces: Any) -> None:
            sent.append("swap")

    transport = RecordedTransport(Inner(), checker)  # type: ignore[arg-type]
    big, small = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    transport.all_gather(big, small)
    transport.reduce_scatter(small, big)
    transport.swap((big, small), (big, small))
    assert sent == ["all_gather", "reduce_scatter", "swap"]
    assert checker.calls == [
        "all_gather of the DCP exchange of [3, 4] float32",
        "reduce_scatter of the DCP exchange of [2, 3, 4] float32",
        "swap of the DCP exchange of [2, 3, 4] float32 + [3, 4] float32",
    ]


def test_the_start_up_is_compared_before_the_first_step(checker: Listening) -> None:
    class Worker:
        def init_device(self) -> None: ...

        def execute_model(self, output: int) -> int:
            checker.note(f"run {output}")
            return output + 1

    worker = Worker()
    rank_check_seams.install(worker, 5)
    checker.note("capture")
    assert [worker.execute_model(4), worker.execute_model(5)] == [5, 6]
    assert checker.calls == ["capture", "end of step 0", "run 4", "end of step 1", "run 5", "end of step 2"]


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where this is the first import of vLLM
@pytest.mark.parametrize("n", [2, 4])
def test_plans_of_all_ranks_are_written_down_alike(n: int) -> None:
    """A rank's own share of the keys is no difference."""
    from vllm_dcp_hybrid.attention.recorded_cpu import invariant_rows

    texts = set()
    for rank in range(n):
        plan = make_plan([0, 1, 5, 8], [40, 33, 3], lambda length, rank=rank: local_len(length, rank, n, 16))
        texts.add(describe_branch("plan", invariant_rows(plan)))
    (text,) = texts
    assert text.startswith("plan with decode 1, context 1, prefill 1 (")


def test_branches_with_other_rows_read_otherwise() -> None:
    one, two = (describe_branch("rows", {"decode": [(0, 0, 1, length)]}) for length in (7, 8))
    assert one != two
