# SPDX-License-Identifier: Apache-2.0
"""One environment per release: stock vLLM for CPUs, this package (editable) and its test tools.

Environments share their files with uv's cache through hard links, so that a second one with the same torch takes
seconds and little disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from releases import CPU_WHEEL

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# Where environments lie; `{release}` may occur anywhere in it.
PLACE = "DCP_MATRIX_DIR"
DEFAULT_PLACE = str(ROOT / ".cache" / "matrix" / "{release}")
MARKER = "made_by_matrix.json"
PYTHONS = ">=3.10,<3.13"


class CannotMake(RuntimeError):
    """An environment could not be made."""


@dataclass(frozen=True)
class Environment:
    """An interpreter that imports the vLLM of one release.

    Attributes:
        release: of vLLM.
        directory: of the environment.
        is_ours: whether it was made here, and may be removed.
    """

    release: str
    directory: Path
    is_ours: bool

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.directory / "lib").glob("python3*")) / "site-packages"

    def distributions(self) -> dict[str, str]:
        """Versions of all that is installed, by canonical name."""
        return {
            canonicalize_name(distribution.metadata["Name"]): distribution.version
            for distribution in metadata.distributions(path=[str(self.site_packages)])
        }

    def versions(self) -> dict[str, str]:
        """Versions of what matters, without starting the interpreter."""
        found = self.distributions()
        python = self.site_packages.parent.name.removeprefix("python")
        wanted = (CPU_WHEEL, "torch", "torchvision", "transformers")
        return {"python": python, **{name: found[name] for name in wanted if name in found}}


def directory_for(release: str, place: str | None = None) -> Path:
    """Where the environment of a release lies.

    Args:
        release: of vLLM.
        place: a directory, or a path with `{release}` in it; else the variable `DCP_MATRIX_DIR`; else `.cache/matrix`.
    """
    place = place or os.environ.get(PLACE) or DEFAULT_PLACE
    template = place if "{release}" in place else f"{place}/{{release}}"
    return Path(template.replace("{release}", release)).expanduser().resolve()


def requirements(requires_dist: Iterable[str]) -> list[str]:
    """What a wheel asks for, in a form that an ordinary index can give.

    vLLM's CPU wheels pin `torch==X+cpu`; an ordinary index has X only.  They do not pin torchaudio, which does not pin
    torch either, and does not load beside an older one.  Requirements of extras are left out.
    """
    wanted = []
    for line in requires_dist:
        requirement = Requirement(line)
        if requirement.marker is None or "extra" not in str(requirement.marker):
            wanted.append(str(requirement).replace("+cpu", ""))
            if requirement.name == "torch" and (requirement.marker is None or requirement.marker.evaluate()):
                pins = [each.version.partition("+")[0] for each in requirement.specifier if each.operator == "=="]
                wanted += [f"torchaudio<={pin}" for pin in pins]
    return wanted


def unmet(wanted: Iterable[str], found: Mapping[str, str]) -> list[str]:
    """Requirements for this machine that are not installed, or in another version."""
    wrong = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            version = found.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name}{requirement.specifier} and not {version}")
    return wrong


def recipe(release: str, pyproject: dict[str, Any]) -> dict[str, str]:
    """Changes when an environment has to be made again."""
    ours = [pyproject["project"], pyproject["dependency-groups"]["test"], Path(__file__).read_text()]
    return {"release": release, "ours": hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()[:16]}


def prepare(release: str, place: str | None = None) -> Environment:
    """The environment of a release with a CPU wheel: one that is complete is reused, another is made.

    A directory that holds an interpreter and no marker of ours is used as it is, if its vLLM is the right one.

    Raises:
        CannotMake: with the end of uv's words.
    """
    directory = directory_for(release, place)
    wanted = recipe(release, tomllib.loads((ROOT / "pyproject.toml").read_text()))
    marker = directory / MARKER
    if marker.is_file() and json.loads(marker.read_text()) == wanted:
        return Environment(release, directory, is_ours=True)
    if not marker.is_file() and (directory / "bin" / "python").exists():
        return adopt(release, directory)
    shutil.rmtree(directory, ignore_errors=True)
    return make(release, directory, wanted)


def adopt(release: str, directory: Path) -> Environment:
    """Somebody else's environment.

    Raises:
        CannotMake: it is of another release.
    """
    environment = Environment(release, directory, is_ours=False)
    found = environment.versions().get(CPU_WHEEL)
    if found != release:
        raise CannotMake(f"{directory} has {CPU_WHEEL} {found}, not {release}, and was not made here: move it away")
    return environment


def make(release: str, directory: Path, marker: dict[str, str]) -> Environment:
    """Make it with uv; the marker is written last."""
    environment = Environment(release, directory, is_ours=True)
    uv("venv", "--python", PYTHONS, str(directory))
    # Unfinished, and ours: a second attempt may remove it.
    (directory / MARKER).write_text("{}")
    into = ("pip", "install", "--python", str(environment.python))
    uv(*into, "--no-deps", f"{CPU_WHEEL}=={release}")
    (wheel,) = metadata.distributions(name=CPU_WHEEL, path=[str(environment.site_packages)])
    wanted = directory / "requirements.txt"
    wanted.write_text("\n".join(requirements(wheel.requires or ())) + "\n")
    group = f"{ROOT / 'pyproject.toml'}:test"
    uv(*into, "--requirements", str(wanted), "--group", group, "--editable", str(ROOT))
    wrong = unmet(wanted.read_text().splitlines(), environment.distributions())
    if wrong:
        raise CannotMake(f"the environment of {release} is not what its wheel asks for: {', '.join(wrong)}")
    (directory / MARKER).write_text(json.dumps(marker))
    return environment


def remove(environment: Environment) -> None:
    """Delete an environment that was made here; others stay."""
    if environment.is_ours:
        shutil.rmtree(environment.directory, ignore_errors=True)


def uv(*arguments: str) -> None:
    """Run uv outside of this project, whose own overrides are for the one release that it is developed with."""
    done = subprocess.run(["uv", "--quiet", *arguments], cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMake(f"uv {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")


def child_environment(extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Variables for the processes of an environment: nothing of the caller's own Python, byte code is kept."""
    # Without byte code every engine process compiles vLLM and torch again.
    unwanted = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_PLUGINS", "DCP_HYBRID"}
    return {name: value for name, value in os.environ.items() if name not in unwanted} | dict(extra)
