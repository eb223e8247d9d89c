# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import (
    load_release,
    read_release_file,
    release_dir,
    release_path,
    write_release_file,
)


def test_what_is_written_is_read_back(sandbox: Any, tmp_path: Path) -> None:
    sandbox.write("quotes", "def f(a='\"\\\\ \N{SNOWMAN}\\n', *, b: 'str' = \"x\"):\n    pass\n")
    release_file = sandbox.record(
        sandbox.patch("ops:double", leans_on=["ops:Runner", "ops:FACTOR"]),
        sandbox.patch("quotes:f"),
        sandbox.patch("ops:extra", "added", how="add"),
    )
    path = tmp_path / "1.0.toml"
    write_release_file(release_file, path)
    assert read_release_file(path) == release_file


def test_equal_contents_give_equal_bytes_in_any_order_of_patches(sandbox: Any, tmp_path: Path) -> None:
    patches = [sandbox.patch("ops:double"), sandbox.patch("lazy:late"), sandbox.patch("ops:Runner.run")]
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    write_release_file(sandbox.record(*patches), one)
    write_release_file(sandbox.record(*reversed(patches)), other)
    assert one.read_bytes() == other.read_bytes()


def test_a_record_says_where_the_target_is_and_how_it_is_called(sandbox: Any) -> None:
    release_file = sandbox.record(sandbox.patch("ops:Runner.run"))
    record = release_file.records[sandbox.name("ops:Runner.run")]
    assert record.file == f"{sandbox.pkg}/ops.py"
    assert (sandbox.root / "ops.py").read_text().splitlines()[record.line - 1].strip().startswith("def run(")
    assert record.signature == "def run(self, step, *, extra=0)"


def test_a_record_lists_the_bindings_of_wrapped_targets(sandbox: Any) -> None:
    release_file = sandbox.record(sandbox.patch("ops:double"), sandbox.patch("lazy:late"))
    assert release_file.bindings == {
        sandbox.name("ops:double"): (sandbox.name("renamed:twice"), sandbox.name("user:double")),
        sandbox.name("lazy:late"): (),
    }


def test_patches_for_other_releases_are_not_recorded(sandbox: Any) -> None:
    assert sandbox.record(sandbox.patch("ops:nothing", releases=">=2")).records == {}


def test_a_release_is_found_by_its_public_version(sandbox: Any, tmp_path: Path) -> None:
    release_file = sandbox.record(sandbox.patch("ops:double"))
    write_release_file(release_file, release_path("1.0+cpu", tmp_path))
    assert (tmp_path / "1.0.toml").is_file()
    assert load_release("1.0+cu130", tmp_path) == release_file
    assert load_release("1.0rc1", tmp_path) is None


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.0.toml"
    path.write_text("format = 99\n")
    with pytest.raises(ValueError, match="format 99"):
        read_release_file(path)


def test_a_checkout_keeps_its_release_files_beside_the_package() -> None:
    import vllm_dcp_hybrid.patching

    package_dir = Path(vllm_dcp_hybrid.patching.__file__).resolve().parents[1]
    assert release_dir() in (package_dir / "_patches", package_dir.parent / "patches")
