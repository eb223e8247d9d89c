# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import write_release_file

CHILD = """
    import importlib
    from vllm_dcp_hybrid.patching import apply, mark_of, read_release_file

    def start(patches, package, path):
        return apply(
            patches,
            package=package,
            version="1.0",
            owner="plugin 7.0",
            release_file=read_release_file(path),
        )

    def report(queue, patches, package, path):
        ops = importlib.import_module(package + ".ops")
        was_patched = mark_of(ops.double) is not None
        applied = start(patches, package, path)
        lazy = importlib.import_module(package + ".lazy")
        is_once = mark_of(ops.double.__wrapped__) is None and mark_of(lazy.late.__wrapped__) is None
        values = ops.double(1), lazy.late()
        queue.put((was_patched, applied.fingerprint, applied.probe().in_use, is_once, values))
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_has_each_patch_once_and_the_same_fingerprint(sandbox: Any, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    sandbox.write("child", CHILD, sandbox.plugin)
    child = __import__(f"{sandbox.plugin}.child", fromlist=["child"])
    patches = (sandbox.patch("ops:double"), sandbox.patch("lazy:late", "say_patched"))
    path = sandbox.directory / "1.0.toml"
    write_release_file(sandbox.record(*patches), path)
    sandbox.load("ops")
    applied = child.start(patches, sandbox.pkg, path)
    sandbox.applied.append(applied)

    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child.report, args=(queue, patches, sandbox.pkg, path))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    was_patched, fingerprint, in_use, is_once, values = queue.get()

    assert was_patched is (method == "fork")
    assert fingerprint == applied.fingerprint
    assert in_use == ("ops-double", "lazy-late")
    assert is_once
    assert values == (-2, "patched")
    assert sandbox.name("lazy") not in sys.modules


def test_a_hook_that_is_pending_at_a_fork_fires_in_the_child_without_applying_again(sandbox: Any) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork here")
    sandbox.write(
        "late_child",
        f"""
        import importlib

        def report(queue):
            queue.put(importlib.import_module("{sandbox.pkg}.lazy").late())
        """,
        sandbox.plugin,
    )
    child = __import__(f"{sandbox.plugin}.late_child", fromlist=["late_child"])
    sandbox.apply(sandbox.patch("lazy:late", "say_patched"))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child.report, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get() == "patched"


def test_the_fingerprint_changes_with_owner_patches_and_source(sandbox: Any) -> None:
    one, two = sandbox.patch("ops:double"), sandbox.patch("lazy:late")
    prints = [sandbox.apply(one).fingerprint, sandbox.apply(one, two).fingerprint]
    prints += [sandbox.apply(one, owner="plugin 7.1").fingerprint]
    path = sandbox.root / "ops.py"
    path.write_text(path.read_text().replace("return FACTOR * x", "return x * FACTOR"))
    prints += [sandbox.apply(one).fingerprint]
    assert len(set(prints)) == 4
    assert sandbox.apply(one).fingerprint == prints[3]
