# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_dcp_hybrid.patching import Patch, expired, select


def make(**over: Any) -> Patch:
    facts: dict[str, Any] = {
        "name": "one-patch",
        "target": "pkg.mod:func",
        "how": "wrap",
        "replacement": "ours.mod:func",
        "processes": ("worker",),
        "releases": ">=0.25,<0.26",
        "why": "it raises",
        "until": "0.26.0",
    }
    return Patch(**{**facts, **over})


@pytest.mark.parametrize(
    "over",
    [
        {"name": "Not_Kebab"},
        {"name": "x-"},
        {"target": "pkg.mod.func"},
        {"target": "pkg.mod:Class."},
        {"replacement": "ours:"},
        {"how": "replace"},
        {"leans_on": ("nowhere",)},
        {"releases": "0.25.x"},
        {"releases": ""},
        {"why": " "},
        {"until": ""},
    ],
)
def test_a_declaration_that_says_too_little_or_nonsense_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"patch|is not of the form"):
        make(**over)


def test_a_string_is_no_tuple_of_names() -> None:
    with pytest.raises(TypeError, match="leans_on"):
        make(leans_on="pkg.other:func")


@pytest.mark.parametrize(
    ("version", "is_claimed"),
    [
        ("0.24.9", False),
        ("0.25.0", True),
        ("0.25.1+cpu", True),
        ("0.25.2.dev3+gabc", True),
        ("0.26.0", False),
        ("0.26.0rc1", False),
    ],
)
def test_a_release_selects_the_patches_written_for_it(version: str, is_claimed: bool) -> None:
    assert bool(select([make()], version)) is is_claimed


def test_select_keeps_the_order() -> None:
    patches = [make(name=name, target=f"pkg.mod:{name}") for name in ("b", "a", "c")]
    assert [patch.name for patch in select(patches, "0.25.1")] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("releases", "until", "version", "is_due"),
    [
        (">=0.25,<0.26", "0.26.0", "0.26.0", False),
        (">=0.25", "0.26.0", "0.25.1", False),
        (">=0.25", "0.26.0", "0.26.0", True),
        (">=0.25", "0.26.0", "0.27.1+cu130", True),
        (">=0.25", "upstream merges a hook", "0.99.0", False),
    ],
)
def test_a_patch_that_still_claims_a_release_from_its_until_on_is_expired(
    releases: str, until: str, version: str, is_due: bool
) -> None:
    assert bool(expired([make(releases=releases, until=until)], version)) is is_due


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"target": "pkg.mod:other"}, "two patches are named 'one-patch'"),
        ({"name": "b"}, "both change pkg.mod:func"),
        ({"name": "b", "target": "json:loads"}, "outside of package 'pkg'"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(second: dict[str, Any], message: str) -> None:
    from vllm_dcp_hybrid.patching.patch import check_unique

    with pytest.raises(ValueError, match=message):
        check_unique([make(), make(**second)], "pkg")
