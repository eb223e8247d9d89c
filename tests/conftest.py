# SPDX-License-Identifier: Apache-2.0
"""Suites by marker.

Plain tests always run.  ``contract`` tests run where a vLLM is installed, or, for tests of a ``release``, where its
sources are at hand.  ``e2e`` tests start engines, which takes minutes on two cores: they run when asked for
(``-m e2e`` or ``--e2e``).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from vllm_dcp_hybrid.cli import sources
from vllm_dcp_hybrid.cli.installed import find_vllm
from vllm_dcp_hybrid.declarations import ALL_PATCHES
from vllm_dcp_hybrid.patching import known_releases, public_version, select

REQUIRE_VARIABLE = "DCP_HYBRID_REQUIRE_SOURCES"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="also run the tests that start real engines")
    parser.addoption(
        "--vllm-source",
        action="append",
        default=[],
        metavar="DIR",
        help="a source tree of a vLLM release to test the release files on, beside those in record's cache",
    )
    parser.addoption(
        "--release",
        action="append",
        default=[],
        metavar="RELEASE",
        help="of the tests for every known vLLM release, run those for this one only; may be given several times",
    )
    parser.addoption(
        "--require-sources",
        action="store_true",
        default=bool(os.environ.get(REQUIRE_VARIABLE)),
        help=f"fail where a known release has no sources at hand (also {REQUIRE_VARIABLE}=1)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None
    asked_for = config.getoption("-m") or ""
    for item in items:
        needs_vllm = "contract" in item.keywords and "release" not in getattr(item, "fixturenames", ())
        if needs_vllm and not has_vllm:
            item.add_marker(pytest.mark.skip(reason="needs an installed vLLM (uv run --extra cpu ...)"))
        if "e2e" in item.keywords:
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="needs an installed vLLM (uv run --extra cpu ...)"))
            elif not (config.getoption("--e2e") or "e2e" in asked_for):
                item.add_marker(pytest.mark.skip(reason="starts real engines: ask with --e2e"))
    leave_out_other_releases(config, items)
    # Fast tests first, engines last.
    items.sort(key=lambda item: ("e2e" in item.keywords, "contract" in item.keywords))


def leave_out_other_releases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked ``replaces(name, ...)`` runs where a patch for the installed release has one of these."""
    vllm = find_vllm()
    patches = select(ALL_PATCHES, vllm.version) if vllm else ALL_PATCHES
    in_use = {patch.replacement for patch in patches}
    marks = {item: [set(mark.args) for mark in item.iter_markers("replaces")] for item in items}
    known = {patch.replacement for patch in ALL_PATCHES}
    unknown = {name for sets in marks.values() for names in sets for name in names - known}
    if unknown:
        raise pytest.UsageError(f"no patch has the replacement(s) {', '.join(sorted(unknown))}")
    others = [item for item in items if not all(names & in_use for names in marks[item])]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def given_trees(config: pytest.Config) -> dict[str, Path]:
    """By release, the source trees of ``--vllm-source``."""
    trees = (sources.given_tree(Path(text)) for text in config.getoption("--vllm-source"))
    return {public_version(version): root for root, version in trees}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of ``release`` runs for each release that has a file, or whose tree is given."""
    if "release" in metafunc.fixturenames:
        known = dict.fromkeys([*known_releases(), *given_trees(metafunc.config)])
        metafunc.parametrize("release", metafunc.config.getoption("--release") or known, scope="session")


@pytest.fixture(scope="session")
def release_root(release: str, pytestconfig: pytest.Config) -> Path:
    """The directory ``vllm`` of ``release``: given, from record's cache, or the installed one."""
    root = given_trees(pytestconfig).get(release) or sources.cached_tree(release)
    vllm = find_vllm()
    if root is None and vllm is not None and public_version(vllm.version) == release:
        root = vllm.root
    if root is None:
        reason = f"no sources of vLLM {release}: `vllm-dcp-hybrid record --check --release {release}` fetches them"
        pytest.fail(reason) if pytestconfig.getoption("--require-sources") else pytest.skip(reason)
    return root
