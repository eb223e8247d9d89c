# SPDX-License-Identifier: Apache-2.0
"""Patch functions of an installed package: declare, check all, apply all, prove it, undo it.

It knows nothing of the package it patches. The parts, from the bottom: `patch` (the declaration), `problems`
(one class per refusal), `source` (source text without import), `bindings` and `release_file` (what a release
looked like), `wrapper` and `live` (objects of this process), `check`, `apply`.
"""

from __future__ import annotations

from vllm_dcp_hybrid.patching.apply import Applied, ProbeReport, apply
from vllm_dcp_hybrid.patching.bindings import find_bindings
from vllm_dcp_hybrid.patching.check import check, missing_replacements
from vllm_dcp_hybrid.patching.patch import Patch, expired, is_among, public_version, select
from vllm_dcp_hybrid.patching.problems import (
    DriftedTarget,
    ForeignPatch,
    MissingReplacement,
    MissingTarget,
    NameTaken,
    NotInUse,
    PatchError,
    SeveralProblems,
    UnknownRelease,
    UnrecordedTarget,
    UnsupportedTarget,
)
from vllm_dcp_hybrid.patching.release_file import (
    ReleaseFile,
    known_releases,
    load_release,
    read_release_file,
    record,
    release_dir,
    release_path,
    write_release_file,
)
from vllm_dcp_hybrid.patching.source import SourceNotFound, SourceRecord, SourceTree, package_root
from vllm_dcp_hybrid.patching.wrapper import Mark, mark_of

__all__ = [
    "Applied",
    "DriftedTarget",
    "ForeignPatch",
    "Mark",
    "MissingReplacement",
    "MissingTarget",
    "NameTaken",
    "NotInUse",
    "Patch",
    "PatchError",
    "ProbeReport",
    "ReleaseFile",
    "SeveralProblems",
    "SourceNotFound",
    "SourceRecord",
    "SourceTree",
    "UnknownRelease",
    "UnrecordedTarget",
    "UnsupportedTarget",
    "apply",
    "check",
    "expired",
    "find_bindings",
    "is_among",
    "known_releases",
    "load_release",
    "mark_of",
    "missing_replacements",
    "package_root",
    "public_version",
    "read_release_file",
    "record",
    "release_dir",
    "release_path",
    "select",
    "write_release_file",
]
