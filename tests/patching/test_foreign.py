# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from typing import Any

import pytest
import wrapt

from vllm_dcp_hybrid.patching import ForeignPatch, NotInUse, SeveralProblems

FOREIGN = """
    import functools
    import wrapt

    def replaced(*args):
        return "foreign"

    def wraps(function):
        @functools.wraps(function)
        def inner(*args):
            return "foreign"
        return inner

    def proxies(function):
        def wrapper(wrapped, instance, args, kwargs):
            return "foreign"
        return wrapt.FunctionWrapper(function, wrapper)
"""


@pytest.fixture
def foreign(sandbox: Any) -> Any:
    sandbox.write("other", FOREIGN, sandbox.plugin)
    sandbox.load("")
    return __import__(f"{sandbox.plugin}.other", fromlist=["other"])


@pytest.mark.parametrize("style", ["replaced", "wraps", "proxies"])
def test_a_function_that_another_plugin_changed_before_is_refused(sandbox: Any, foreign: Any, style: str) -> None:
    ops = sandbox.load("ops")
    ops.double = foreign.replaced if style == "replaced" else getattr(foreign, style)(ops.double)
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other") as caught:
        sandbox.apply(sandbox.patch("lazy:late"), sandbox.patch("ops:double"))
    assert caught.value.owner == "plugin 7.0"


@pytest.mark.parametrize("attribute", ["run", "kind", "add", "__init__"])
def test_a_method_that_another_plugin_changed_is_refused(sandbox: Any, foreign: Any, attribute: str) -> None:
    runner = sandbox.load("ops").Runner
    setattr(runner, attribute, foreign.proxies(vars(runner)[attribute]))
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other"):
        sandbox.apply(sandbox.patch(f"ops:Runner.{attribute}"))


def test_a_class_that_another_plugin_exchanged_is_refused(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    ops.Runner = type("Runner", (ops.Runner,), {"__module__": "elsewhere", "run": ops.Runner.run})
    with pytest.raises(ForeignPatch, match="elsewhere"):
        sandbox.apply(sandbox.patch("ops:Runner.run"))


@pytest.mark.parametrize("style", ["replaced", "wraps", "proxies"])
def test_a_generated_init_that_another_plugin_changed_is_refused(sandbox: Any, foreign: Any, style: str) -> None:
    cls = sandbox.load("config").Config
    cls.__init__ = foreign.replaced if style == "replaced" else getattr(foreign, style)(cls.__init__)
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other"):
        sandbox.apply(sandbox.patch("config:Config.__init__"))


def test_a_decorated_function_counts_as_stock_until_one_more_layer_is_added(sandbox: Any, foreign: Any) -> None:
    sandbox.write(
        "decorated",
        """
        import contextlib

        @contextlib.contextmanager
        def scope():
            yield 1
        """,
    )
    decorated = sandbox.load("decorated")
    stock = decorated.scope
    sandbox.apply(sandbox.patch("decorated:scope", "untouched")).undo()
    decorated.scope = foreign.wraps(stock)
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other"):
        sandbox.apply(sandbox.patch("decorated:scope", "untouched"))


def test_a_change_at_import_time_fails_the_import(sandbox: Any, foreign: Any) -> None:
    def change(module: Any) -> None:
        module.late = foreign.replaced

    wrapt.register_post_import_hook(change, sandbox.name("lazy"))
    sandbox.apply(sandbox.patch("lazy:late", "say_patched"))
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other"):
        sandbox.load("lazy")
    assert sandbox.name("lazy") not in sys.modules
    # wrapt's hooks are spent by one import: ours is there again for the next attempt.
    assert sandbox.load("lazy").late() == "patched"


def test_another_owner_of_the_same_mechanism_is_refused(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:double"), owner="rival 1.0")
    with pytest.raises(ForeignPatch, match=r"'rival 1\.0'"):
        sandbox.apply(sandbox.patch("ops:double"))
    assert ops.double(1) == -2


def test_a_foreign_copy_in_a_recorded_holder_is_refused_and_nothing_stays(sandbox: Any, foreign: Any) -> None:
    ops, user = sandbox.load("ops"), sandbox.load("user")
    before = ops.double
    user.double = foreign.replaced
    with pytest.raises(ForeignPatch, match=r"user:double"):
        sandbox.apply(sandbox.patch("ops:double"))
    assert ops.double is before
    assert user.double is foreign.replaced


def test_a_module_from_another_directory_is_refused(sandbox: Any) -> None:
    sandbox.load("ops").__file__ = "/elsewhere/ops.py"
    with pytest.raises(ForeignPatch, match=r"/elsewhere/ops\.py"):
        sandbox.apply(sandbox.patch("ops:double"))


def test_a_name_to_add_that_another_plugin_added_is_refused(sandbox: Any, foreign: Any) -> None:
    sandbox.load("ops").extra = foreign.replaced
    with pytest.raises(ForeignPatch, match=rf"{sandbox.plugin}\.other"):
        sandbox.apply(sandbox.patch("ops:extra", "added", how="add"))


def test_all_problems_are_reported_together(sandbox: Any, foreign: Any) -> None:
    ops = sandbox.load("ops")
    ops.double = foreign.replaced
    ops.Runner.run = foreign.replaced
    with pytest.raises(SeveralProblems, match=r"(?s)2 problems.*double.*Runner\.run") as caught:
        sandbox.apply(sandbox.patch("ops:double"), sandbox.patch("ops:Runner.run"))
    assert [type(problem) for problem in caught.value.problems] == [ForeignPatch, ForeignPatch]


def test_the_probe_finds_what_was_overwritten_afterwards(sandbox: Any, foreign: Any) -> None:
    ops, user = sandbox.load("ops"), sandbox.load("user")
    applied = sandbox.apply(
        sandbox.patch("ops:double"),
        sandbox.patch("ops:Runner.run"),
        sandbox.patch("lazy:late"),
    )
    user.double = foreign.proxies(user.double)
    report = applied.probe()
    assert report.in_use == ("ops-runner-run",)
    assert report.pending == ("lazy-late",)
    (problem,) = report.problems
    assert isinstance(problem, NotInUse)
    assert (problem.name, problem.holder) == (sandbox.name("user:double"), f"{sandbox.plugin}.other")
    assert ops.double(1) == -2


def test_the_probe_leaves_out_patches_that_ask_for_it(sandbox: Any, foreign: Any) -> None:
    ops = sandbox.load("ops")
    applied = sandbox.apply(sandbox.patch("ops:double", probe=False))
    ops.double = foreign.replaced
    assert applied.probe().problems == ()


def test_undo_leaves_what_others_changed_afterwards(sandbox: Any, foreign: Any) -> None:
    ops = sandbox.load("ops")
    applied = sandbox.apply(sandbox.patch("ops:double"))
    ops.double = foreign.replaced
    applied.undo()
    assert ops.double is foreign.replaced
