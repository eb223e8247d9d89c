# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  # imports follow the check for torch
"""100,000 random geometries against tokens that are dealt out one at a time; and planted faults, which are found.

``DCP_HYBRID_FUZZ`` is the number of geometries, ``DCP_HYBRID_FUZZ_FIRST`` the first one's number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dealt_tokens import Case, expected_slots, make_case, opened_blocks

from vllm_dcp_hybrid import geometry, placement
from vllm_dcp_hybrid.attention import local_lens, plan
from vllm_dcp_hybrid.placement import Placement
from vllm_dcp_hybrid.worker import slot_mapping

FIRST = int(os.environ.get("DCP_HYBRID_FUZZ_FIRST", "0"))
CASES = range(FIRST, FIRST + int(os.environ.get("DCP_HYBRID_FUZZ", "100000")))
PAD = -1


def geometry_of(case: Case) -> geometry.GroupGeometry:
    return geometry.GroupGeometry(
        placement=case.placement,
        block_size=case.block_size,
        dcp_world_size=case.dcp_world_size,
        interleave_size=case.interleave_size if case.is_sharded else 1,
    )


def naive_slots_are_the_dealt_ones(case: Case) -> None:
    group = geometry_of(case)
    starts, positions = case.query_start_loc(), case.positions()
    for rank in range(case.dcp_world_size):
        num_shards, shard = group.shard(rank)
        slots = slot_mapping.slot_mapping_naive(
            starts,
            positions,
            case.rows,
            block_size=case.block_size,
            kernel_block_size=case.kernel_block_size,
            dcp_world_size=num_shards,
            dcp_rank=shard,
            interleave_size=case.interleave_size,
            num_padded_tokens=len(positions) + case.num_padding,
        )
        assert slots == expected_slots(case, rank, PAD), f"rank {rank}"


def torch_slots_are_the_dealt_ones(case: Case) -> None:
    num_shards, shard = geometry_of(case).shard(case.rank)
    positions = torch.tensor(case.positions(), dtype=torch.int64)
    slots = torch.full((len(positions) + case.num_padding,), -777)
    slot_mapping.compute_slot_mapping_torch(
        torch.tensor(case.query_start_loc(), dtype=torch.int32),
        positions,
        torch.tensor(case.rows or [[0]], dtype=torch.int32),
        slots,
        block_size=case.block_size,
        kernel_block_size=case.kernel_block_size,
        dcp_world_size=num_shards,
        dcp_rank=shard,
        interleave_size=case.interleave_size,
    )
    assert slots.tolist() == expected_slots(case, case.rank, PAD)


def plans_have_the_dealt_lengths(case: Case) -> None:
    """Every row of the one kind that its lengths say, and the local lengths of all ranks, new tokens cached or not."""
    group, dealt = geometry_of(case), case.deal()
    starts = case.query_start_loc()
    for rank in range(case.dcp_world_size):
        counts = dealt.lengths[rank if case.is_sharded else 0]
        rows: dict[str, list[Any]] = {"decode_rows": [], "context_rows": [], "prefill_rows": []}
        for req, (context, new) in enumerate(case.requests):
            if not new:
                continue
            if not context:
                kind, num_seen = "prefill_rows", 0
            else:
                kind, num_seen = ("decode_rows", context + 1) if new == 1 else ("context_rows", context)
            rows[kind].append((req, starts[req], starts[req] + new, context, counts[num_seen]))
        found = plan.make_plan(starts, case.seq_lens(), lambda length, rank=rank: group.local_len(length, rank))
        for kind, expected in rows.items():
            fields = [(r.req, r.start, r.end, r.context_len, r.local_kv_len) for r in getattr(found, kind)]
            assert fields == expected, f"{kind} of rank {rank}"


def device_lengths_are_the_dealt_ones(case: Case) -> None:
    """Decode rows first, as the runner orders a step; a padded row has length 0."""
    requests = sorted((request for request in case.requests if request[1]), key=lambda request: request[1] > 1)
    num_decodes = sum(new == 1 for _, new in requests)
    seq_lens, query_lens = [context + new for context, new in requests], [new for _, new in requests]
    counts = case.deal().lengths[case.rank if case.is_sharded else 0]
    expected = [counts[context + 1 if row < num_decodes else context] for row, (context, _) in enumerate(requests)]
    num_shards, shard = geometry_of(case).shard(case.rank)
    sizes = {"n": num_shards, "rank": shard, "interleave_size": case.interleave_size}
    assert local_lens.local_lens_naive(seq_lens, query_lens, num_decodes, **sizes) == expected
    into = torch.full((len(requests) + case.num_padding,), -7, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    local_lens.fill_local_lens_torch(torch.tensor(seq_lens, dtype=torch.int32), starts, num_decodes, into, **sizes)
    assert into.tolist() == expected + [0] * case.num_padding


def blocks_are_those_that_dealing_opens(case: Case) -> None:
    """Blocks of a sequence, and the width of a row, of attention and of recurrent states beside it."""
    n, interleave = case.num_shards, case.interleave_size if case.is_sharded else 1
    attention = geometry_of(case)
    num_drafts = case.number % 4
    state = {
        mode: geometry.GroupGeometry(
            placement=Placement.REPLICATED,
            block_size=case.block_size,
            dcp_world_size=case.dcp_world_size,
            recurrent_mode=mode,
            num_speculative_blocks=num_drafts,
        )
        for mode in ("align", "none")
    }
    opened = opened_blocks(n, interleave, case.block_size)
    whole = opened_blocks(1, 1, case.block_size)
    for length in case.seq_lens():
        assert attention.num_blocks(length) == attention.table_width(length) == opened[length]
        assert state["align"].num_blocks(length) == whole[length]
        assert state["align"].table_width(length) == whole[length] + num_drafts
        assert state["none"].table_width(length) == 1 + num_drafts
    # One block id covers tokens up to the one that opens the next.
    assert opened.index(2) == attention.effective_block_size + 1


Check = Callable[..., None]
CHECKS: tuple[Check, ...] = (
    naive_slots_are_the_dealt_ones,
    plans_have_the_dealt_lengths,
    blocks_are_those_that_dealing_opens,
)
TENSOR_CHECKS: tuple[Check, Check] = (torch_slots_are_the_dealt_ones, device_lengths_are_the_dealt_ones)


def first_failure(numbers: Iterable[int]) -> str | None:
    """What is wrong with the first case that is not as dealt; the twins on tensors take turns."""
    for number in numbers:
        case = make_case(number)
        for check in (*CHECKS, TENSOR_CHECKS[number % 2]):
            try:
                check(case)
            except (AssertionError, LookupError, ValueError, RuntimeError) as error:
                return f"{check.__name__}: {case}: {error!r}"
    return None


def test_every_geometry_maps_plans_and_counts_as_tokens_are_dealt() -> None:
    failure = first_failure(CASES)
    assert failure is None, failure


FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "owner one interleave late": (
        slot_mapping,
        "if owner != dcp_rank:",
        "if owner != (dcp_rank - 1) % dcp_world_size:",
    ),
    "owner one interleave late, torch": (
        slot_mapping,
        "runs % dcp_world_size == dcp_rank",
        "(runs + 1) % dcp_world_size == dcp_rank",
    ),
    "interleave over kernel blocks": (
        slot_mapping,
        "divmod(positions[token], block_size * dcp_world_size)",
        "divmod(positions[token], kernel_block_size * dcp_world_size)",
    ),
    "interleave over kernel blocks, torch": (
        slot_mapping,
        "offsets = positions % (block_size * dcp_world_size)",
        "offsets = positions % (kernel_block_size * dcp_world_size)",
    ),
    "pad slot lost": (slot_mapping, "slots = [PAD_SLOT_ID] * num_padded_tokens", "slots = [0] * num_padded_tokens"),
    "pad slot lost, torch": (slot_mapping, "torch.where(is_written_here, slots, PAD_SLOT_ID)", "slots"),
    "pad slot lost behind the last token, torch": (
        slot_mapping,
        "    slot_mapping[num_tokens:].fill_(PAD_SLOT_ID)\n",
        "",
    ),
    "row of the next request, torch": (slot_mapping, "tokens, right=True)", "tokens, right=False)"),
    "local length one more": (placement, "rest - rank * i, 0", "rest - rank * i + 1, 0"),
    "local length of the next rank": (placement, "rest - rank * i, 0", "rest - (rank + 1) * i, 0"),
    "decode row without its own token": (
        plan,
        "context_len, local_len(seq_len)",
        "context_len, local_len(context_len)",
    ),
    "context row with its new tokens": (plan, "context_len, local_len(context_len)", "context_len, local_len(seq_len)"),
    "local gate before the exchange": (plan, "if context_len <= 0:", "if local_len(context_len) <= 0:"),
    "padded rows are planned": (plan, "if end <= start:", "if end < start:"),
    "device lengths without the decodes' own tokens": (
        local_lens,
        "    counted[:num_decodes] = seq_lens[:num_decodes]\n",
        "",
    ),
    "device lengths stale behind the last row": (local_lens, "    into[num_reqs:] = 0\n", ""),
    "device lengths rounded up": (local_lens, "rest.clamp(0, interleave_size)", "rest.clamp(1, interleave_size)"),
    "recurrent rows N times too short": (
        geometry,
        "cdiv(max_len, self.effective_block_size)",
        "cdiv(max_len, self.block_size * self.dcp_world_size)",
    ),
    "recurrent blocks N times too large": (
        geometry,
        "cdiv(num_tokens, self.effective_block_size)",
        "cdiv(num_tokens, self.block_size * self.dcp_world_size)",
    ),
    "effective block not scaled": (geometry, "return self.block_size * self.num_shards", "return self.block_size"),
    "effective block scaled twice": (
        geometry,
        "return self.block_size * self.num_shards",
        "return self.block_size * self.num_shards**2",
    ),
    "draft blocks forgotten": (geometry, "return 1 + self.num_speculative_blocks", "return 1"),
    "a replicated group has shards": (geometry, "if self.is_sharded else (1, 0)", "if True else (1, 0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_2_000_geometries(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = FAULTS[fault]
    plant(module, right, wrong, monkeypatch)
    failure = first_failure(range(2000))
    assert failure is not None


def plant(module: ModuleType, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a line of a module for one test."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1, f"{module.__name__} has {source.count(right)} lines with {right!r}"
    names = dict(vars(module))
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), names)
    for name, value in names.items():
        if not name.startswith("__") and value is not vars(module).get(name):
            monkeypatch.setattr(module, name, value)
