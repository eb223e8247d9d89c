# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_dcp_hybrid.patching import find_bindings


def bindings(sandbox: Any, target: str) -> list[str]:
    (found,) = find_bindings(sandbox.root, sandbox.pkg, [sandbox.name(target)]).values()
    return [text.removeprefix(sandbox.pkg + ".") for text in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from {pkg}.lazy import late", ["new:late"]),
        ("from .lazy import late as l", ["new:l"]),
        ("from .lazy import *", ["new:late"]),
        ("try:\n    from .lazy import late\nexcept ImportError:\n    late = None", ["new:late"]),
        ("if 1 + 1 == 3:\n    pass\nelse:\n    from .lazy import late", ["new:late"]),
        ("import {pkg}.lazy\nlate = 1", []),
        ("from . import lazy\nx = lazy.late", []),
        ("def f():\n    from .lazy import late\n    return late", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .lazy import late", []),
        ("# late\nfrom .ops import double", []),
    ],
)
def test_imports_that_bind_the_target_at_module_level_are_found(sandbox: Any, text: str, expected: list[str]) -> None:
    sandbox.write("new", text.replace("{pkg}", sandbox.pkg) + "\n")
    assert bindings(sandbox, "lazy:late") == expected


def test_relative_imports_are_resolved_in_packages_and_modules(sandbox: Any) -> None:
    sandbox.write("sub/__init__", "from ..lazy import late\n")
    sandbox.write("sub/inner", "from ..lazy import late\n")
    sandbox.write("sub/deep/__init__", "from ...lazy import late\nfrom .. import inner\n")
    assert bindings(sandbox, "lazy:late") == ["sub.deep:late", "sub.inner:late", "sub:late"]


def test_reexports_are_followed_under_new_names(sandbox: Any) -> None:
    sandbox.write("a", "from .lazy import late as first\n")
    sandbox.write("b", "from .a import first as second\n")
    sandbox.write("c", "from .b import second\n")
    assert bindings(sandbox, "lazy:late") == ["a:first", "b:second", "c:second"]


def test_a_method_has_no_bindings(sandbox: Any) -> None:
    sandbox.write("new", "from .ops import Runner\n")
    assert bindings(sandbox, "ops:Runner.run") == []
