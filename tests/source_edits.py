# SPDX-License-Identifier: Apache-2.0
"""Find definitions in Python source by its syntax tree, and change a line of them; the mechanism uses no tree."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_dcp_hybrid.patching import SourceTree

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

parse = functools.lru_cache(maxsize=64)(ast.parse)


def definitions(text: str, path: tuple[str, ...]) -> list[Definition]:
    """Every definition of a dotted name, in file order."""
    bodies: list[list[ast.stmt]] = [parse(text).body]
    found: list[Definition] = []
    for part in path:
        found = [node for body in bodies for node in _defined(body) if _name(node) == part]
        bodies = [node.body for node in found if isinstance(node, ast.ClassDef)]
    return found


def source_of(text: str, node: Definition) -> str:
    """The lines of a definition with its decorators, dedented."""
    lines = text.splitlines(keepends=True)[_first_line(node) - 1 : node.end_lineno]
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    # Not textwrap.dedent: lines within strings may stand further left.
    return "".join(line.removeprefix(indent) for line in lines).strip()


def with_changed_lines(text: str, paths: Iterable[tuple[str, ...]]) -> str:
    """`text` with one more statement in the last definition of each dotted name, before its last statement."""
    lines = text.splitlines(keepends=True)
    places = {_place(definitions(text, path)[-1]) for path in paths}
    for number, indent in sorted(places, reverse=True):
        if indent is None:
            lines[number - 1] = lines[number - 1].replace("=", "= None or", 1)
        else:
            lines.insert(number - 1, " " * indent + "pass\n")
    return "".join(lines)


def with_renamed(text: str, paths: Iterable[tuple[str, ...]]) -> str:
    """`text` without the dotted names: every definition has another name."""
    lines = text.splitlines(keepends=True)
    for path in paths:
        for node in definitions(text, path):
            old = lines[node.lineno - 1]
            start = old.index(path[-1])
            if not old[:start].endswith("renamed_"):
                lines[node.lineno - 1] = f"{old[:start]}renamed_{old[start:]}"
    return "".join(lines)


def with_added(text: str, path: tuple[str, ...]) -> str:
    """`text` with a definition of a dotted name that it lacks."""
    function = f"\n\ndef {path[-1]}():\n    pass\n"
    if len(path) == 1:
        return f"{text}{function}"
    holder = definitions(text, path[:-1])[-1]
    lines = text.splitlines(keepends=True)
    lines.insert(holder.end_lineno or 0, textwrap.indent(function, "    "))
    return "".join(lines)


class EditedTree(SourceTree):
    """A source tree of which some modules read otherwise than they lie on disk."""

    def __init__(self, root: Path, texts: Mapping[str, str]) -> None:
        super().__init__(root)
        self._texts = texts

    def read(self, module: str) -> bytes:
        return self._texts[module].encode() if module in self._texts else super().read(module)


def _defined(body: Iterable[ast.stmt]) -> Iterator[Definition]:
    """The definitions of a body, those under `if`, `try` and their like included."""
    for node in body:
        if isinstance(node, Definition):
            yield node
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _defined(handler.body)


def _name(node: Definition) -> str | None:
    if isinstance(node, _SCOPES):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else None


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _place(node: Definition) -> tuple[int, int | None]:
    """(line, indent of a statement to insert before it, None for an assignment to change in place)."""
    if not isinstance(node, _SCOPES):
        return node.lineno, None
    return _first_line(node.body[-1]), node.body[-1].col_offset
