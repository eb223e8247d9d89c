# SPDX-License-Identifier: Apache-2.0
"""One changed line in the installed vLLM: `doctor` and start-up refuse, name it, and leave stock as it is.

The installed files stay as they are: a directory of links to them, with one changed copy, comes first on the path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from source_edits import with_changed_lines

from vllm_dcp_hybrid import patching, tiny_models
from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES, ENTRY_PATCHES, FEATURE_PATCHES
from vllm_dcp_hybrid.patching.patch import split_name
from vllm_dcp_hybrid.patching.release_file import fingerprinted

pytestmark = pytest.mark.contract

_VLLM = find_vllm()
ENTRY, FEATURE, PATCHES = (
    patching.select(patches, _VLLM.version) if _VLLM else ()
    for patches in (ENTRY_PATCHES, FEATURE_PATCHES, ALL_PATCHES)
)
TARGETS = sorted({target for patch in PATCHES for target in fingerprinted(patch)})
_FEATURE_WRAPS = [patch for patch in FEATURE if patch.how == "wrap"]
# Where the change is -> its target: of each way in which the plugin can meet it.
ROLES: dict[str, Callable[[], str]] = {
    "entry": lambda: ENTRY[0].target,
    "first-of-the-feature": lambda: _FEATURE_WRAPS[0].target,
    "last-of-the-feature": lambda: _FEATURE_WRAPS[-1].target,
    "leaned-on": lambda: next(patch.leans_on[-1] for patch in reversed(FEATURE) if patch.leans_on),
}

STARTUP = """
import importlib, json, logging, sys

import vllm.plugins

warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("vllm.dcp_hybrid").addHandler(handler)

vllm.plugins.load_general_plugins()
from vllm_dcp_hybrid import plugin, require_plugin
from vllm_dcp_hybrid.declarations import ALL_PATCHES
from vllm_dcp_hybrid.patching import load_release, mark_of, select
from vllm_dcp_hybrid.patching.live import ABSENT, holder_of, own_attribute
from vllm_dcp_hybrid.patching.patch import split_name

changed = []
bindings = load_release(vllm.__version__).bindings
for patch in select(ALL_PATCHES, vllm.__version__):
    importlib.import_module(split_name(patch.target).module)
    for text in (patch.target, *bindings.get(patch.target, ())):
        name = split_name(text)
        value = own_attribute(holder_of(name), name.path[-1])
        is_changed = value is not ABSENT if patch.how == "add" else mark_of(value) is not None
        if name.module in sys.modules and is_changed:
            changed.append(patch.name)
try:
    demanded = str(require_plugin())
except Exception as error:
    demanded = str(error)
print("FACTS " + json.dumps({
    "root": vllm.__path__[0],
    "refusal": plugin.status().refusal,
    "warnings": warnings,
    "changed": changed,
    "demanded": demanded,
}))
"""


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A site directory with a `vllm` of links."""
    assert _VLLM is not None
    site = tmp_path_factory.mktemp("site")
    link_tree(_VLLM.root, site / "vllm", {file_of(target).parent for target in TARGETS})
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "DCP_HYBRID")}
    # A spawned process and vLLM's own children find it, too.
    environment["PYTHONPATH"] = str(site)
    return SimpleNamespace(site=site, environment=environment)


@pytest.fixture(params=ROLES)
def modified(overlay: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The same with one more line in one target."""
    target = ROLES[request.param]()
    name = split_name(target)
    original = file_of(target)
    copy = overlay.site / original.relative_to(original.parents[len(name.module.split(".")) - 1])
    text = with_changed_lines(original.read_text(), [name.path])
    assert len(text.splitlines()) == len(original.read_text().splitlines()) + 1
    copy.unlink()
    copy.write_text(text)
    yield SimpleNamespace(role=request.param, target=target, **vars(overlay))
    copy.unlink()
    copy.symlink_to(original)


def file_of(target: str) -> Path:
    assert _VLLM is not None
    return patching.SourceTree(_VLLM.root).file_of(split_name(target).module)


def link_tree(root: Path, copy: Path, folders: set[Path]) -> None:
    """Directories that hold one of `folders` are made, all else is linked."""
    copy.mkdir()
    for path in root.iterdir():
        if any(folder == path or path in folder.parents for folder in folders):
            link_tree(path, copy / path.name, folders)
        else:
            (copy / path.name).symlink_to(path)


def run(modified: SimpleNamespace, *args: str, limit_s: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        env=modified.environment,
        cwd=modified.site,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def startup(modified: SimpleNamespace) -> dict[str, Any]:
    done = run(modified, "-c", STARTUP)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    facts: dict[str, Any] = json.loads(line.removeprefix("FACTS "))
    assert Path(facts["root"]) == modified.site / "vllm"
    return facts


def test_links_to_the_installed_vllm_are_the_stock_release(overlay: SimpleNamespace) -> None:
    facts = startup(overlay)
    assert facts["refusal"] is None
    assert {*facts["changed"]} == {patch.name for patch in PATCHES}


def test_doctor_refuses_one_changed_line_and_names_it(modified: SimpleNamespace) -> None:
    done = run(modified, "-m", "vllm_dcp_hybrid.cli.main", "doctor", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_status"] == 1
    assert Path(document["vllm"]["root"]) == modified.site / "vllm"
    assert document["would_be_applied"] is False
    assert document["reasons"][0].startswith(f"{modified.target} at vllm/")
    states = {row["name"]: row["state"] for row in document["patches"]}
    users = {patch.name for patch in PATCHES if modified.target in fingerprinted(patch)}
    assert {name for name, state in states.items() if modified.target in state} == users


def test_startup_refuses_one_changed_line_and_nothing_is_half_applied(modified: SimpleNamespace) -> None:
    facts = startup(modified)
    assert f"{modified.target} at vllm/" in facts["refusal"]
    (warning,) = facts["warnings"]
    assert facts["refusal"] in warning
    assert modified.target in facts["demanded"]
    # What can only say why is there, unless it is what does not fit.
    assert sorted(facts["changed"]) == ([] if modified.role == "entry" else sorted(patch.name for patch in ENTRY))


@pytest.mark.parametrize("modified", ["last-of-the-feature"], indirect=True)
def test_a_server_that_demands_the_plugin_stops_before_its_weights_load(
    modified: SimpleNamespace, tmp_path: Path
) -> None:
    model = tiny_models.make_tiny_model("lfm2", tmp_path / "model", num_key_value_heads=1)
    serve = ("-m", "vllm_dcp_hybrid.cli.stock", "serve", str(model), "--enable-plugin", "dcp_hybrid")
    done = run(modified, *serve, "-tp", "2", "-dcp", "2", "--dtype", "float32", "--enforce-eager")
    log = done.stdout + done.stderr
    assert done.returncode not in (0, -9), log[-3000:]
    assert f"{modified.target} at vllm/" in log
    assert "Loading weights" not in log
