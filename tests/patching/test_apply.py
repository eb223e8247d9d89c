# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import MissingTarget, NameTaken, UnsupportedTarget, mark_of, record


def test_a_function_in_a_loaded_module_is_wrapped_at_once(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:double"))
    assert ops.double(4) == -8
    assert ops.double.__name__ == "double"
    assert ops.double.__doc__ == "Double it."


def test_a_method_gets_its_instance_and_keyword_arguments(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("ops:Runner.run"))
    assert sandbox.load("ops").Runner(10).run(1, extra=5) == -16


def test_a_subclass_inherits_the_patch(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("ops:Runner.run"))
    assert sandbox.load("ops").Child(10).run(1) == -11


def test_a_classmethod_keeps_the_class_that_it_is_called_on(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:Runner.kind", "untouched"))
    assert (ops.Runner.kind(), ops.Child.kind(), ops.Child(1).kind()) == ("Runner", "Child", "Child")
    assert mark_of(vars(ops.Runner)["kind"]) == ("plugin 7.0", "ops-runner-kind")


def test_a_staticmethod_gets_no_instance(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:Runner.add"))
    assert ops.Runner.add(1, 2) == ops.Runner(0).add(1, 2) == -3


def test_init_is_wrapped(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("ops:Runner.__init__", "grow"))
    assert sandbox.load("ops").Child(1).size == 101


def test_post_init_of_a_dataclass_is_wrapped(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("config:Config.__post_init__", "grow"))
    assert sandbox.load("config").Config(size=1).size == 102


def test_the_generated_init_of_a_dataclass_is_wrapped(sandbox: Any) -> None:
    sandbox.load("config")
    sandbox.apply(sandbox.patch("config:Config.__init__", "grow"))
    assert sandbox.load("config").Config(size=1).size == 102


@pytest.mark.parametrize("method", ["__init__", "__post_init__"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_methods_of_a_pydantic_dataclass_are_wrapped(sandbox: Any, method: str, is_loaded: bool) -> None:
    pytest.importorskip("pydantic")
    sandbox.write(
        "pyd",
        """
        from pydantic.dataclasses import dataclass

        @dataclass
        class Config:
            size: int = 1

            def __post_init__(self):
                self.size += 1

        @dataclass
        class Outer:
            config: Config
        """,
    )
    if is_loaded:
        sandbox.load("pyd")
    sandbox.apply(sandbox.patch(f"pyd:Config.{method}", "grow"))
    pyd = sandbox.load("pyd")
    assert pyd.Outer(pyd.Config(size=1)).config.size == 102
    with pytest.raises(ValueError, match="size"):
        pyd.Config(size="many")


def test_a_cached_function_keeps_its_cache_methods(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:cached"))
    assert ops.cached(3) == -3
    assert ops.cached.cache_info().misses == 1


def test_a_module_that_is_not_loaded_is_patched_when_it_is_imported(sandbox: Any) -> None:
    applied = sandbox.apply(sandbox.patch("lazy:late", "say_patched"))
    assert sandbox.name("lazy") not in sys.modules
    assert applied.pending == ("lazy-late",)
    assert sandbox.load("lazy").late() == "patched"
    assert applied.pending == ()


def test_applying_does_not_import_the_package(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("lazy:late"), sandbox.patch("ops:double"))
    assert not [name for name in sys.modules if name.partition(".")[0] in (sandbox.pkg, sandbox.plugin)]


def test_the_replacement_is_imported_at_the_first_call(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.apply(sandbox.patch("ops:double"))
    assert f"{sandbox.plugin}.swap" not in sys.modules
    ops.double(1)
    assert f"{sandbox.plugin}.swap" in sys.modules


def test_copies_made_by_from_import_before_are_changed(sandbox: Any) -> None:
    user, renamed = sandbox.load("user"), sandbox.load("renamed")
    sandbox.apply(sandbox.patch("ops:double"))
    assert user.use(1) == renamed.twice(1) == -2


def test_copies_that_are_not_recorded_are_found_by_identity(sandbox: Any) -> None:
    renamed = sandbox.load("renamed")
    patch = sandbox.patch("ops:double")
    sandbox.apply(patch, release_file=sandbox.record_bindings(patch))
    assert renamed.twice(1) == -2


def test_copies_made_by_from_import_after_are_of_the_patched_function(sandbox: Any) -> None:
    applied = sandbox.apply(sandbox.patch("ops:double"))
    user = sandbox.load("user")
    assert user.use(1) == -2
    assert user.double is sandbox.load("ops").double
    assert applied.probe().in_use == ("ops-double",)


@pytest.mark.parametrize(("version", "value"), [("1.0", -2), ("1.5", "patched")])
def test_of_several_variants_the_one_for_the_release_is_applied(sandbox: Any, version: str, value: Any) -> None:
    variants = [
        sandbox.patch("ops:double", "minus", releases="<1.5"),
        sandbox.patch("ops:double", "say_patched", releases=">=1.5"),
    ]
    release_file = record(variants, sandbox.root, release=version, made_by="pytest")
    sandbox.apply(*variants, version=version, release_file=release_file)
    assert sandbox.load("ops").double(1) == value


def test_variants_that_claim_the_same_release_are_refused(sandbox: Any) -> None:
    variants = [sandbox.patch("ops:double", releases=">=1.0"), sandbox.patch("ops:double", releases="<1.5")]
    with pytest.raises(ValueError, match="two patches are named 'ops-double'"):
        sandbox.record(*variants)
    with pytest.raises(ValueError, match="two patches are named 'ops-double'"):
        sandbox.apply(*variants, release_file=sandbox.record(variants[0]))


def test_a_copy_made_while_the_target_module_was_still_executing_is_changed(sandbox: Any) -> None:
    sandbox.write("first", "def f():\n    return 'stock'\nfrom . import second\n")
    sandbox.write("second", "from .first import f\n")
    sandbox.apply(sandbox.patch("first:f", "say_patched"))
    sandbox.load("first")
    assert sandbox.load("second").f() == "patched"


def test_a_recorded_copy_that_does_not_exist_is_refused(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    sandbox.load("lazy")
    patch = sandbox.patch("ops:double")
    with pytest.raises(MissingTarget, match="lazy:double"):
        sandbox.apply(patch, release_file=sandbox.record_bindings(patch, "lazy:double"))
    assert ops.double(1) == 2


def test_a_recorded_copy_that_does_not_exist_is_refused_at_its_import(sandbox: Any) -> None:
    sandbox.load("ops")
    patch = sandbox.patch("ops:double")
    sandbox.apply(patch, release_file=sandbox.record_bindings(patch, "lazy:double"))
    for _ in range(2):
        with pytest.raises(MissingTarget, match="lazy:double"):
            sandbox.load("lazy")


def test_five_applications_change_nothing_more(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    patches = [sandbox.patch("ops:double"), sandbox.patch("lazy:late", "say_patched")]
    applied = [sandbox.apply(*patches) for _ in range(5)]
    lazy = sandbox.load("lazy")
    assert ops.double(1) == -2
    assert lazy.late() == "patched"
    assert mark_of(ops.double.__wrapped__) is None
    assert mark_of(lazy.late.__wrapped__) is None
    assert len({each.fingerprint for each in applied}) == 1
    assert all(len(each.probe().in_use) == 2 for each in applied)


def test_a_second_copy_of_the_mechanism_recognises_the_wrappers_of_the_first(sandbox: Any) -> None:
    patch = sandbox.patch("ops:double")
    ops = sandbox.load("ops")
    sandbox.apply(patch)
    release_file = sandbox.record(patch)
    mechanism = "vllm_dcp_hybrid.patching"
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(mechanism)}
    try:
        import vllm_dcp_hybrid.patching as copy

        assert copy.apply is not saved[mechanism].apply
        again = copy.apply([patch], package=sandbox.pkg, version="1.0", owner="plugin 7.0", release_file=release_file)
        assert again.probe().in_use == ("ops-double",)
        assert ops.double(1) == -2
    finally:
        for name in [name for name in sys.modules if name.startswith(mechanism)]:
            del sys.modules[name]
        sys.modules.update(saved)


def test_undo_restores_every_name(sandbox: Any) -> None:
    ops, user = sandbox.load("ops"), sandbox.load("user")
    before = dict(vars(ops.Runner)), dict(vars(ops)), user.double
    applied = sandbox.apply(
        sandbox.patch("ops:double"),
        sandbox.patch("ops:Runner.kind"),
        sandbox.patch("ops:extra", "added", how="add"),
    )
    assert ops.extra() == "added"
    renamed = sandbox.load("renamed")
    assert mark_of(renamed.twice) is not None
    applied.undo()
    assert (dict(vars(ops.Runner)), dict(vars(ops)), user.double) == before
    assert renamed.twice is ops.double


def test_undo_disarms_the_hooks_that_did_not_fire(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("lazy:late", "say_patched")).undo()
    assert sandbox.load("lazy").late() == "stock"


def test_a_failure_rolls_back_the_patches_before_it(sandbox: Any) -> None:
    ops, user = sandbox.load("ops"), sandbox.load("user")
    before = ops.double
    with pytest.raises(UnsupportedTarget, match=r"ops:Runner\.shape.* is a property"):
        sandbox.apply(
            sandbox.patch("ops:double"),
            sandbox.patch("lazy:late", "say_patched"),
            sandbox.patch("ops:Runner.shape"),
        )
    assert ops.double is before
    assert user.double is before
    assert sandbox.load("lazy").late() == "stock"


def test_a_failure_in_a_hook_fails_the_import(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("ops:double"), sandbox.patch("ops:Runner.shape"))
    sandbox.write("watcher", "from . import ops\n")
    with pytest.raises(UnsupportedTarget):
        sandbox.load("watcher")
    assert not [name for name in sys.modules if name.startswith(sandbox.pkg + ".")]


def test_a_class_is_no_target(sandbox: Any) -> None:
    sandbox.load("ops")
    with pytest.raises(UnsupportedTarget):
        sandbox.apply(sandbox.patch("ops:Runner"))


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("target", ["ops:extra", "ops:Runner.extra", "ops:Child.run"])
def test_a_name_that_the_release_lacks_is_added(sandbox: Any, target: str, is_loaded: bool) -> None:
    if is_loaded:
        sandbox.load("ops")
    patch = sandbox.patch(target, "added", how="add")
    applied = [sandbox.apply(patch), sandbox.apply(patch)][0]
    value = sandbox.load("ops")
    for part in target.partition(":")[2].split("."):
        value = getattr(value, part)
    assert value() == "added"
    assert applied.probe().in_use == (patch.name,)


def test_a_name_that_the_release_has_is_not_added(sandbox: Any) -> None:
    with pytest.raises(NameTaken, match="ops:double"):
        sandbox.record(sandbox.patch("ops:double", "added", how="add"))


def test_an_added_replacement_is_not_imported_before_the_module(sandbox: Any) -> None:
    sandbox.apply(sandbox.patch("ops:extra", "added", how="add"))
    assert f"{sandbox.plugin}.swap" not in sys.modules


def test_patches_for_other_releases_are_left_out(sandbox: Any) -> None:
    ops = sandbox.load("ops")
    applied = sandbox.apply(sandbox.patch("ops:double", releases=">=2"))
    assert ops.double(1) == 2
    assert applied.patches == ()
