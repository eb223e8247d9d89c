# SPDX-License-Identifier: Apache-2.0
"""The release file: what the patched source looked like in one release, as deterministic TOML."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_dcp_hybrid.patching.bindings import find_bindings
from vllm_dcp_hybrid.patching.patch import Patch, check_unique, public_version, select, split_name
from vllm_dcp_hybrid.patching.problems import MissingTarget, NameTaken, PatchError, raise_problems
from vllm_dcp_hybrid.patching.source import SourceNotFound, SourceRecord, SourceTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1


@dataclass(frozen=True)
class ReleaseFile:
    """The fingerprints of one release.

    Args:
        release: public version, for example `"0.25.1"`.
        made_by: the command that wrote the file.
        records: by target.
        bindings: by wrapped target, the names that from-imports bind to it.
        absent: names that the release lacks and patches add.
        file_digests: by relative file; a file that is equal as a whole needs no further look.
    """

    release: str
    made_by: str
    records: Mapping[str, SourceRecord]
    bindings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    file_digests: Mapping[str, str] = field(default_factory=dict)


def release_dir() -> Path:
    """Where the release files lie: `_patches` in the installed package, `patches` beside it in a checkout."""
    package_dir = Path(__file__).resolve().parents[1]
    packaged = package_dir / "_patches"
    return packaged if packaged.is_dir() else package_dir.parent / "patches"


def release_path(version: str, directory: Path | None = None) -> Path:
    """The file that belongs to release `version`, whether or not it exists."""
    return (directory or release_dir()) / f"{public_version(version)}.toml"


def known_releases(directory: Path | None = None) -> tuple[str, ...]:
    """The releases that have a file, oldest first."""
    return tuple(sorted((path.stem for path in (directory or release_dir()).glob("*.toml")), key=Version))


def load_release(version: str, directory: Path | None = None) -> ReleaseFile | None:
    """The release file of `version`; None where that release is not known."""
    path = release_path(version, directory)
    return read_release_file(path) if path.is_file() else None


def read_release_file(path: Path) -> ReleaseFile:
    """Read what `write_release_file` wrote.

    Raises:
        ValueError: the file is not of this format.
    """
    data: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    if data.get("format") != FORMAT:
        raise ValueError(f"{path}: format {data.get('format')!r} is not {FORMAT}")
    tables: dict[str, dict[str, Any]] = data.get("target", {})
    return ReleaseFile(
        release=data["release"],
        made_by=data["made_by"],
        absent=tuple(data.get("absent", ())),
        file_digests=dict(data.get("files", {})),
        records={
            target: SourceRecord(target, table["file"], table["line"], table["signature"], table["digest"])
            for target, table in tables.items()
        },
        bindings={target: tuple(table["bound_by"]) for target, table in tables.items() if "bound_by" in table},
    )


def write_release_file(release: ReleaseFile, path: Path) -> None:
    """Write `release` as TOML; equal contents give equal bytes."""
    path.write_text(format_release_file(release), "utf-8", newline="\n")


def format_release_file(release: ReleaseFile) -> str:
    """The TOML text of `release`."""
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Generated: do not edit.",
        f"format = {FORMAT}",
        f"release = {_toml(release.release)}",
        f"made_by = {_toml(release.made_by)}",
        f"absent = {_toml_list(release.absent)}",
        "",
        "[files]",
        *(f"{_toml(file)} = {_toml(digest)}" for file, digest in sorted(release.file_digests.items())),
    ]
    for target, record in sorted(release.records.items()):
        lines += [
            "",
            f"[target.{_toml(target)}]",
            f"file = {_toml(record.file)}",
            f"line = {record.line}",
            f"signature = {_toml(record.signature)}",
            f"digest = {_toml(record.digest)}",
        ]
        if target in release.bindings:
            lines.append(f"bound_by = {_toml_list(release.bindings[target])}")
    return "\n".join(lines) + "\n"


def record(patches: Iterable[Patch], root: Path, *, release: str, made_by: str) -> ReleaseFile:
    """Fingerprint all that the patches for `release` touch and lean on, in the package at `root`.

    Args:
        patches: those that do not claim `release` are left out.
        root: directory of the package.
        release: its version.
        made_by: the command to name in the file.

    Raises:
        MissingTarget: something to fingerprint does not exist.
        NameTaken: a name to add exists already.
        SeveralProblems: more than one of these.
        ValueError: the patches for `release` contradict each other.
    """
    selected = select(patches, release)
    check_unique(selected, root.name)
    tree = SourceTree(root)
    records: dict[str, SourceRecord] = {}
    absent: list[str] = []
    problems: list[PatchError] = []
    wrapped: list[str] = []
    for patch in selected:
        if patch.how == "add":
            problems += absence_problems(patch, tree)
            absent.append(patch.target)
        else:
            wrapped.append(patch.target)
        for target in fingerprinted(patch):
            try:
                records[target] = tree.find(target)
            except SourceNotFound:
                problems.append(MissingTarget(patch.name, target, tree.where(split_name(target).module)))
    raise_problems(problems)
    return ReleaseFile(
        release=public_version(release),
        made_by=made_by,
        records=records,
        bindings=find_bindings(root, root.name, wrapped),
        absent=tuple(sorted(absent)),
        file_digests={
            tree.relative_file_of(module): tree.file_digest(module)
            for module in {split_name(target).module for target in (*records, *absent)}
        },
    )


def fingerprinted(patch: Patch) -> tuple[str, ...]:
    """The targets of `patch` that a release file holds a record of."""
    return patch.leans_on if patch.how == "add" else (patch.target, *patch.leans_on)


def absence_problems(patch: Patch, tree: SourceTree) -> list[PatchError]:
    """Why the name that `patch` adds cannot be added: its module or class is missing, or it exists."""
    name = split_name(patch.target)
    try:
        if len(name.path) > 1:
            tree.block(f"{name.module}:{'.'.join(name.path[:-1])}")
        if tree.outline(name.module).block(name.path) is None:
            return []
    except SourceNotFound:
        return [MissingTarget(patch.name, patch.target, tree.where(name.module))]
    return [NameTaken(patch.name, patch.target, tree.where(name.module))]


def _toml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _toml_list(texts: Iterable[str]) -> str:
    return "[" + ", ".join(map(_toml, texts)) + "]"
