# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import pickle

import pytest

from vllm_dcp_hybrid.patching import PatchError, SeveralProblems

KINDS = [kind for kind in PatchError.__subclasses__() if kind is not SeveralProblems]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_one_sentence_that_uses_every_fact(kind: type[PatchError]) -> None:
    facts = [f"<{field.name}>" for field in dataclasses.fields(kind)]
    message = str(kind(*facts))
    assert all(fact in message for fact in facts)
    assert message.endswith(".")
    assert ". " not in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_problem_survives_the_way_to_another_process(kind: type[PatchError]) -> None:
    problem = kind(*(field.name for field in dataclasses.fields(kind)))
    copy = pickle.loads(pickle.dumps(problem))
    assert type(copy) is kind
    assert str(copy) == str(problem)


def test_several_problems_list_them_all() -> None:
    problems = tuple(kind(*(field.name for field in dataclasses.fields(kind))) for kind in KINDS)
    several = pickle.loads(pickle.dumps(SeveralProblems(problems)))
    assert all(str(problem) in str(several) for problem in problems)
