# SPDX-License-Identifier: Apache-2.0
"""The plugin in a process: light, once, the same everywhere, and nothing at all where it cannot work.

What changes vLLM runs in processes of its own, each of which reports many facts, for the import of vLLM is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES, ENTRY_PATCHES, FEATURE_PATCHES
from vllm_dcp_hybrid.patching import select

pytestmark = pytest.mark.contract

_VLLM = find_vllm()
PATCHES, ENTRY, FEATURE = (
    select(patches, _VLLM.version) if _VLLM else () for patches in (ALL_PATCHES, ENTRY_PATCHES, FEATURE_PATCHES)
)
ADDED = {patch.target for patch in PATCHES if patch.how == "add"}

COMMON = """
import json, logging, multiprocessing, sys, time

import vllm

FACTS = {}
VERSION = vllm.__version__

def tell(**facts):
    FACTS.update(facts)

def finish():
    print("FACTS " + json.dumps(FACTS), flush=True)

def names():
    \"\"\"By every name that holds a target in the installed release, the patch.\"\"\"
    from vllm_dcp_hybrid.declarations import ALL_PATCHES
    from vllm_dcp_hybrid.patching import select
    from vllm_dcp_hybrid.patching.release_file import load_release

    bindings = load_release(VERSION).bindings
    return {
        text: patch.name
        for patch in select(ALL_PATCHES, VERSION)
        for text in (patch.target, *bindings.get(patch.target, ()))
    }

def marks():
    \"\"\"Which patch each name of each loaded module carries: None for stock, 'absent' for no such name.\"\"\"
    from vllm_dcp_hybrid.patching import mark_of
    from vllm_dcp_hybrid.patching.live import ABSENT, holder_of, own_attribute
    from vllm_dcp_hybrid.patching.patch import split_name

    found = {}
    for text in names():
        name = split_name(text)
        if name.module in sys.modules:
            value = own_attribute(holder_of(name), name.path[-1])
            mark = mark_of(value)
            found[text] = "absent" if value is ABSENT else (mark and mark.patch)
    return found
"""

LIFE = (
    COMMON
    + """
def report(queue):
    \"\"\"In a child: plugins are loaded as vLLM's own processes load them.\"\"\"
    import vllm.plugins
    from vllm_dcp_hybrid import plugin

    was_applied = plugin.status().is_applied
    vllm.plugins.load_general_plugins()
    queue.put((was_applied, plugin.status().fingerprint, plugin.status().refusal))

def child(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    process.join(300)
    return queue.get() if process.exitcode == 0 else f"exit code {process.exitcode}"

if __name__ == "__main__":
    import importlib
    import vllm.plugins

    before = set(sys.modules)
    start = time.process_time()
    import vllm_dcp_hybrid
    vllm_dcp_hybrid.register()
    tell(cpu_seconds=time.process_time() - start)
    import torch
    from vllm_dcp_hybrid import plugin
    from vllm_dcp_hybrid.patching.patch import split_name

    tell(
        new_modules=sorted(m for m in set(sys.modules) - before if m.split(".")[0] in ("vllm", "torch")),
        loaded=[m for m in sys.modules if m.startswith("vllm.")],
        cuda_is_initialized=torch.cuda.is_initialized(),
    )
    first = plugin.status()
    tell(refusal=first.refusal, fingerprint=first.fingerprint, summary=first.summary())
    tell(children={method: child(method) for method in ("fork", "spawn")})

    # Its import is the first of vLLM's module of specs, to which a name is added meanwhile.
    was_loaded = "vllm.v1.kv_cache_interface" in sys.modules
    import vllm_dcp_hybrid.core.kv_cache_specs
    tell(specs_first=[was_loaded, vllm_dcp_hybrid.core.kv_cache_specs.specs.__name__])
    unimportable = {}
    for text in names():
        try:
            importlib.import_module(split_name(text).module)
        except ImportError as error:
            unimportable[text] = str(error)
    tell(unimportable=unimportable, names=names())
    marks_once = marks()
    values = {text: id(importlib.import_module(split_name(text).module)) for text in marks_once}
    for _ in range(4):
        vllm_dcp_hybrid.register()
    tell(marks=marks_once, is_same_status=plugin.status() is first, is_unchanged=marks() == marks_once)
    depth, value = 0, vars(vllm.engine.arg_utils.EngineArgs)["create_model_config"]
    while (value := getattr(value, "__wrapped__", None)) is not None:
        depth += 1
    tell(depth=depth)
    probes = [first.entry.probe(), first.feature.probe()]
    tell(
        in_use=sorted(name for probe in probes for name in probe.in_use),
        pending=sorted(name for probe in probes for name in probe.pending),
        problems=[str(problem) for probe in probes for problem in probe.problems],
    )
    plugin.undo_patches()
    tell(marks_after_undo=marks(), is_applied_after_undo=plugin.status().is_applied)
    vllm_dcp_hybrid.register()
    tell(marks_again=marks(), fingerprint_again=plugin.status().fingerprint)
    finish()
"""
)

REFUSALS = (
    COMMON
    + """
import dataclasses, types
from vllm_dcp_hybrid import patching, plugin, register
from vllm.engine.arg_utils import EngineArgs
import vllm.v1.worker.worker_base

records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("vllm.dcp_hybrid").addHandler(handler)

def attempt(name):
    records.clear()
    for _ in range(3):
        register()
    status = plugin.status()
    tell(**{name: {
        "refusal": status.refusal,
        "is_applied": status.is_applied,
        "marked": sorted({mark for mark in marks().values() if mark not in (None, "absent")}),
        "added": sorted(patch.name for patch in patching.select(plugin.FEATURE_PATCHES, VERSION)
                        if patch.how == "add" and marks().get(patch.target, "absent") != "absent"),
        "warnings": [r.getMessage() for r in records if r.levelno >= logging.WARNING],
        "fingerprint": status.fingerprint,
    }})
    plugin.undo_patches()

load_release = patching.load_release
vllm.__version__ = "0.99.0"
attempt("unknown")
vllm.__version__ = VERSION

def drift(target):
    def load_changed(version):
        release = load_release(version)
        record = dataclasses.replace(release.records[target], digest="0" * 32)
        return dataclasses.replace(release, records={**release.records, target: record}, file_digests={})

    patching.load_release = load_changed

drift("vllm.v1.worker.worker_base:WorkerBase.__init__")
attempt("drifted")
drift("vllm.engine.arg_utils:EngineArgs.from_cli_args")
attempt("entry_drifted")
patching.load_release = load_release

somebody_else = types.ModuleType("somebody_else")
exec("def create_model_config(self): return None", somebody_else.__dict__)
stock = EngineArgs.create_model_config
EngineArgs.create_model_config = somebody_else.create_model_config
attempt("foreign")
tell(foreign_stands=EngineArgs.create_model_config is somebody_else.create_model_config)
EngineArgs.create_model_config = stock

attempt("fine")
register()
EngineArgs.create_model_config = lambda self: None
probe = plugin.status().feature.probe()
tell(overwritten=[str(problem) for problem in probe.problems], still_in_use=list(probe.in_use))
finish()
"""
)


def run(script: str, folder: Path, **environment: str) -> dict[str, Any]:
    """What a script told, run in a process of its own."""
    path = folder / "script.py"
    path.write_text(script)
    env = {name: value for name, value in os.environ.items() if name not in ("DCP_HYBRID", "VLLM_PLUGINS")}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    facts: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    return facts


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(LIFE, tmp_path_factory.mktemp("life"))


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(REFUSALS, tmp_path_factory.mktemp("refusals"))


def test_the_installed_release_is_one_that_the_plugin_knows(life: dict[str, Any]) -> None:
    assert life["refusal"] is None
    assert life["fingerprint"] != "none"
    assert life["fingerprint"] in life["summary"]


def test_case_27_register_takes_less_than_a_tenth_of_a_second(life: dict[str, Any], tmp_path: Path) -> None:
    """CASES 27: the best of up to 5 fresh processes, in CPU time, for the machine may be busy."""
    script = COMMON + (
        "import vllm.plugins\n"
        "start = time.process_time()\n"
        "import vllm_dcp_hybrid\n"
        "vllm_dcp_hybrid.register()\n"
        "tell(cpu_seconds=time.process_time() - start)\n"
        "finish()\n"
    )
    seconds = [life["cpu_seconds"]]
    while min(seconds) >= 0.1 and len(seconds) < 5:
        seconds.append(run(script, tmp_path)["cpu_seconds"])
    assert min(seconds) < 0.1, seconds


def test_case_27_register_imports_nothing_of_vllm_or_torch(life: dict[str, Any]) -> None:
    """CASES 27: no CUDA, no model code, no runner, no attention backend."""
    assert life["new_modules"] == []
    assert not life["cuda_is_initialized"]
    forbidden = ("vllm.model_executor.models", "vllm.v1.worker.gpu_model_runner", "vllm.v1.attention.backends.flash")
    assert [module for module in life["loaded"] if module.startswith(forbidden)] == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_case_27_children_have_the_same_fingerprint(life: dict[str, Any], method: str) -> None:
    """CASES 27: a forked child inherits the patches and does not run plugins again, a spawned one starts anew."""
    assert life["children"][method] == [method == "fork", life["fingerprint"], None]


def test_our_own_modules_can_be_imported_before_what_they_patch(life: dict[str, Any]) -> None:
    """The command line registers first and reads specs then."""
    assert life["specs_first"] == [False, "vllm.v1.kv_cache_interface"]


def test_registering_again_changes_nothing(life: dict[str, Any]) -> None:
    assert life["is_same_status"]
    assert life["is_unchanged"]
    assert life["depth"] == 1


def test_case_28_all_patches_are_in_use_once_their_modules_are_imported(life: dict[str, Any]) -> None:
    """CASES 28: success is what a probe of the running process says."""
    assert life["in_use"] == sorted(set(life["names"].values()))
    assert life["pending"] == []
    assert life["problems"] == []


def test_case_28_every_other_name_of_a_target_holds_the_patch_too(life: dict[str, Any]) -> None:
    """CASES 28: of all modules that can be imported here."""
    expected = {text: name for text, name in life["names"].items() if text not in ADDED | life["unimportable"].keys()}
    assert {text: mark for text, mark in life["marks"].items() if text not in ADDED} == expected
    # Optional packages of connectors and loaders may be missing, no more than that.
    assert not {patch.target for patch in PATCHES} & life["unimportable"].keys(), life["unimportable"]


def test_undo_puts_stock_back_and_register_applies_again(life: dict[str, Any]) -> None:
    after = life["marks_after_undo"]
    assert {text: mark for text, mark in after.items() if text in ADDED} == dict.fromkeys(ADDED, "absent")
    assert {mark for text, mark in after.items() if text not in ADDED} == {None}
    assert not life["is_applied_after_undo"]
    assert life["marks_again"] == life["marks"]
    assert life["fingerprint_again"] == life["fingerprint"]


def test_an_unknown_release_gets_one_warning_and_no_patch(refusals: dict[str, Any]) -> None:
    facts = refusals["unknown"]
    assert "vllm 0.99.0 has no release file" in facts["refusal"]
    (warning,) = facts["warnings"]
    assert facts["refusal"] in warning
    assert (facts["is_applied"], facts["marked"], facts["added"], facts["fingerprint"]) == (False, [], [], "none")


def test_case_28_a_drifted_target_stops_all_of_the_feature_and_is_named(refusals: dict[str, Any]) -> None:
    """CASES 28, 30: never a half-applied state; what is left can only say why."""
    facts = refusals["drifted"]
    assert "WorkerBase.__init__ at vllm/v1/worker/worker_base.py" in facts["refusal"]
    assert "'worker-backends'" in facts["refusal"]
    (warning,) = facts["warnings"]
    assert facts["refusal"] in warning
    assert not facts["is_applied"]
    assert facts["marked"] == sorted(patch.name for patch in ENTRY)
    assert facts["added"] == []


def test_case_30_without_the_entry_nothing_else_is_applied(refusals: dict[str, Any]) -> None:
    """CASES 30: what could not say why it is not in effect must not be in effect."""
    facts = refusals["entry_drifted"]
    assert "EngineArgs.from_cli_args at vllm/engine/arg_utils.py" in facts["refusal"]
    assert (facts["is_applied"], facts["marked"], facts["added"], facts["fingerprint"]) == (False, [], [], "none")


def test_case_30_somebody_elses_patch_stops_all_of_the_feature_and_is_named(refusals: dict[str, Any]) -> None:
    """CASES 30."""
    facts = refusals["foreign"]
    assert "was already changed in this process by 'somebody_else'" in facts["refusal"]
    assert "create_model_config" in facts["refusal"]
    assert len(facts["warnings"]) == 1
    assert not facts["is_applied"]
    assert facts["marked"] == sorted(patch.name for patch in ENTRY)
    assert facts["added"] == []
    assert refusals["foreign_stands"]


def test_after_refusals_the_same_process_can_still_be_patched(refusals: dict[str, Any]) -> None:
    facts = refusals["fine"]
    assert facts["is_applied"]
    assert facts["refusal"] is None
    assert facts["warnings"] == []


def test_case_28_a_patch_that_somebody_overwrote_later_is_not_in_use(refusals: dict[str, Any]) -> None:
    """CASES 28: success logged although another object is in use."""
    (problem,) = refusals["overwritten"]
    assert "'config-world-size'" in problem
    assert "config-world-size" not in refusals["still_in_use"]
    assert len(FEATURE) > len(refusals["still_in_use"]) > 0


@pytest.mark.parametrize(
    ("filter_value", "expected"),
    [(None, "{'mine': 1, 'dcp_hybrid': {'required': True}}"), ("others", "VLLM_PLUGINS leaves it out")],
    ids=["loaded", "filtered-out"],
)
def test_the_python_api_demands_the_plugin_as_the_readme_says(filter_value: str | None, expected: str) -> None:
    """`require_plugin()` is evaluated before vLLM itself has loaded any plugin."""
    code = "from vllm import LLM; import vllm_dcp_hybrid; print(vllm_dcp_hybrid.require_plugin({'mine': 1}))"
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    if filter_value is not None:
        environment["VLLM_PLUGINS"] = filter_value
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == (filter_value is None)
