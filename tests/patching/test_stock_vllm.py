# SPDX-License-Identifier: Apache-2.0
"""The mechanism meets an installed vLLM; each script runs in a process of its own, for its imports are heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_dcp_hybrid.patching import SourceNotFound, package_root
from vllm_dcp_hybrid.patching.bindings import find_bindings

pytestmark = pytest.mark.contract

APPLY = """
import importlib, sys, time
from vllm_dcp_hybrid.patching import Patch, apply, package_root, record

TARGETS = [
    "v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
    "v1.core.kv_cache_coordinator:get_kv_cache_coordinator",
    "v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    "v1.worker.gpu_model_runner:GPUModelRunner.may_reinitialize_input_batch",
    "v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "v1.worker.block_table:MultiGroupBlockTable.__init__",
    "engine.arg_utils:EngineArgs.add_cli_args",
    "engine.arg_utils:EngineArgs.from_cli_args",
    "engine.arg_utils:EngineArgs.__init__",
    "engine.arg_utils:EngineArgs.__post_init__",
    "config.parallel:ParallelConfig.__post_init__",
    "config.parallel:ParallelConfig.__init__",
]
patches = [
    Patch(
        name=f"patch-{number}", target=f"vllm.{target}", how="wrap", replacement="no.such.module:function",
        processes=(), releases=">=0", why="w", until="u",
    )
    for number, target in enumerate(TARGETS)
]
root = package_root("vllm")
release_file = record(patches, root, release="1.0", made_by="pytest")
start = time.process_time()
applied = apply(
    patches, package="vllm", version="1.0", owner="test", release_file=release_file, root_dir=root
)
print("seconds", time.process_time() - start)
assert not {"vllm", "torch", "no"} & sys.modules.keys()
for module in ("v1.engine.core", "v1.worker.gpu_model_runner", "engine.arg_utils", "v1.core.sched.scheduler"):
    importlib.import_module(f"vllm.{module}")
report = applied.probe()
assert len(report.in_use) == len(patches) and not report.problems and not report.pending, report
applied.undo()
again = apply(patches, package="vllm", version="1.0", owner="test", release_file=release_file, root_dir=root)
assert len(again.probe().in_use) == len(patches)
assert again.fingerprint == applied.fingerprint
again.undo()
from vllm.config.parallel import ParallelConfig
assert ParallelConfig(tensor_parallel_size=1).tensor_parallel_size == 1
"""

FOREIGN = """
import importlib, sys, types
from vllm_dcp_hybrid.patching import SourceNotFound, SourceTree, package_root
from vllm_dcp_hybrid.patching.live import foreign_owner
from vllm_dcp_hybrid.patching.patch import Name

for module in ("v1.engine.core", "v1.worker.gpu_worker", "engine.arg_utils", "v1.attention.backends.flash_attn"):
    importlib.import_module(f"vllm.{module}")
kinds = (types.FunctionType, staticmethod, classmethod)
tree, count, foreign = SourceTree(package_root("vllm")), 0, []
for module_name in ("v1.", "config.", "engine.", "distributed.", "model_executor.models."):
    prefix = f"vllm.{module_name}"
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(prefix):
            continue
        found = [((key,), value) for key, value in vars(module).items()]
        found += [((key, k), v) for (key,), cls in found if isinstance(cls, type) for k, v in vars(cls).items()]
        for path, value in found:
            try:
                block = isinstance(value, kinds) and tree.outline(name).block(path)
            except SourceNotFound:
                continue
            # Not by an assignment: `compiled = torch.compile(...)` gets a function that was made elsewhere.
            is_defined = block and block.header.startswith(("def ", "async def ", "class "))
            if is_defined and vars(module)[path[0]].__module__ == name:
                count += 1
                owner = foreign_owner(Name(name, path), value, tree)
                if owner not in (None, "typing"):  # a Protocol gets its __init__ there
                    foreign.append((name, path, owner))
assert count > 2000, count
assert not foreign, foreign
"""


@pytest.fixture(autouse=True)
def _vllm() -> None:
    try:
        package_root("vllm")
    except SourceNotFound:
        pytest.skip("vLLM is not installed")


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_targets_of_every_kind_are_patched_when_stock_vllm_imports_them() -> None:
    run(APPLY)


def test_no_function_of_stock_vllm_is_taken_for_a_foreign_patch() -> None:
    run(FOREIGN)


def test_the_known_copies_in_stock_vllm_are_found() -> None:
    core = "vllm.v1.core"
    targets = {
        f"{core}.kv_cache_utils:resolve_kv_cache_block_sizes": "vllm.v1.engine.core:resolve_kv_cache_block_sizes",
        f"{core}.kv_cache_coordinator:get_kv_cache_coordinator": f"{core}.kv_cache_manager:get_kv_cache_coordinator",
    }
    found = find_bindings(package_root("vllm"), "vllm", targets)
    for target, copy in targets.items():
        assert copy in found[target]
