# SPDX-License-Identifier: Apache-2.0
"""A throw-away package to patch and a throw-away plugin that patches it, under names used once only."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import Applied, Patch, ReleaseFile, apply, record

_numbers = itertools.count()

STOCK = {
    "__init__": "",
    "ops": '''
        import functools

        FACTOR = 2

        def double(x):
            """Double it."""
            return FACTOR * x

        @functools.lru_cache(maxsize=None)
        def cached(x):
            return x

        class Base:
            def inherited(self):
                return "stock"

        class Runner(Base):
            def __init__(self, size):
                self.size = size

            def run(self, step, *, extra=0):
                return self.size + step + extra

            @classmethod
            def kind(cls):
                return cls.__name__

            @staticmethod
            def add(a, b):
                return a + b

            @property
            def shape(self):
                return self.size

        class Child(Runner):
            pass
    ''',
    "user": "from .ops import double\n\ndef use(x):\n    return double(x)\n",
    "renamed": "from .ops import double as twice\n",
    "lazy": "def late():\n    return 'stock'\n",
    "config": """
        from dataclasses import dataclass

        @dataclass
        class Config:
            size: int = 1

            def __post_init__(self):
                self.size += 1
    """,
}
PLUGIN = """
    def minus(wrapped, instance, args, kwargs):
        return -wrapped(*args, **kwargs)

    def untouched(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    def say_patched(wrapped, instance, args, kwargs):
        return "patched"

    def grow(wrapped, instance, args, kwargs):
        wrapped(*args, **kwargs)
        instance.size += 100

    def added():
        return "added"
"""


@dataclass
class Sandbox:
    """The two packages. Text given for patches may hold `{pkg}` and `{plugin}`."""

    directory: Path
    pkg: str
    plugin: str
    applied: list[Applied] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.directory / self.pkg

    def write(self, module: str, text: str, package: str | None = None) -> Path:
        path = self.directory / (package or self.pkg) / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), "utf-8")
        importlib.invalidate_caches()
        return path

    def load(self, module: str) -> Any:
        return importlib.import_module(f"{self.pkg}.{module}" if module else self.pkg)

    def name(self, text: str) -> str:
        return f"{self.pkg}.{text}"

    def patch(self, target: str, replacement: str = "minus", **over: Any) -> Patch:
        facts: dict[str, Any] = {
            "name": target.replace(":", "-").replace(".", "-").replace("_", "-").lower().replace("--", "-"),
            "how": "wrap",
            "processes": (),
            "releases": ">=1.0,<2",
            "why": "a test",
            "until": "the end of the test",
        }
        facts["name"] = "-".join(part for part in facts["name"].split("-") if part)
        over["leans_on"] = tuple(self.name(text) for text in over.get("leans_on", ()))
        return Patch(target=self.name(target), replacement=f"{self.plugin}.swap:{replacement}", **{**facts, **over})

    def record(self, *patches: Patch) -> ReleaseFile:
        return record(patches, self.root, release="1.0", made_by="pytest")

    def record_bindings(self, patch: Patch, *names: str) -> ReleaseFile:
        """A release file that says which other names hold the target, whatever a scan would find."""
        bindings = {patch.target: tuple(self.name(text) for text in names)}
        return replace(self.record(patch), bindings=bindings)

    def apply(self, *patches: Patch, release_file: ReleaseFile | None = None, **over: Any) -> Applied:
        facts: dict[str, Any] = {"package": self.pkg, "version": "1.0+cpu", "owner": "plugin 7.0"}
        if release_file is None:
            release_file = self.record(*patches)
        applied = apply(patches, release_file=release_file, **{**facts, **over})
        self.applied.append(applied)
        return applied


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    number = next(_numbers)
    box = Sandbox(tmp_path, f"stock{number}", f"plugin{number}")
    for module, text in STOCK.items():
        box.write(module, text)
    box.write("__init__", "", box.plugin)
    box.write("swap", PLUGIN, box.plugin)
    sys.path.insert(0, str(tmp_path))
    yield box
    for applied in reversed(box.applied):
        applied.undo()
    sys.path.remove(str(tmp_path))
    for name in list(sys.modules):
        if name.partition(".")[0] in (box.pkg, box.plugin):
            del sys.modules[name]
