# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import wrapt

from vllm_dcp_hybrid.patching import mark_of


@pytest.fixture
def ops(sandbox: Any) -> Any:
    targets = ("ops:double", "ops:Runner.run", "ops:Runner.kind", "ops:Runner.add")
    sandbox.apply(*(sandbox.patch(target, "untouched") for target in targets))
    return sandbox.load("ops")


def test_a_patched_function_is_pickled_by_name(ops: Any) -> None:
    assert pickle.loads(pickle.dumps(ops.double)) is ops.double


def test_patched_methods_are_pickled_by_name(ops: Any) -> None:
    copies = pickle.loads(
        pickle.dumps([ops.Runner.add, ops.Runner(1).add, ops.Child.kind, ops.Runner(1).run, ops.Runner.run])
    )
    assert (copies[0](1, 2), copies[1](1, 2), copies[2](), copies[3](1)) == (3, 3, "Child", 2)
    assert copies[4](ops.Runner(5), 1) == 6


def test_copies_are_the_wrapper_itself_as_for_a_function(ops: Any) -> None:
    bound = ops.Runner.add
    assert copy.copy(ops.double) is copy.deepcopy(ops.double) is ops.double
    assert copy.copy(bound) is copy.deepcopy(bound) is bound


def test_the_signature_is_that_of_the_target(ops: Any) -> None:
    assert str(inspect.signature(ops.Runner.run)) == "(self, step, *, extra=0)"


def test_a_mark_names_owner_and_patch(ops: Any) -> None:
    assert mark_of(ops.double) == ("plugin 7.0", "ops-double")


def test_a_foreign_proxy_around_a_wrapper_has_no_mark(ops: Any) -> None:
    assert mark_of(wrapt.FunctionWrapper(ops.double, lambda wrapped, i, a, k: wrapped(*a, **k))) is None
    assert mark_of(ops.double.__wrapped__) is None


def test_an_error_of_the_original_passes_through(ops: Any) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        ops.double()
