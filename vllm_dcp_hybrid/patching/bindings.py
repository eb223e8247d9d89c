# SPDX-License-Identifier: Apache-2.0
"""Find every module-level `from module import name` that binds a target a second time."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_dcp_hybrid.patching.patch import split_name


def find_bindings(root: Path, package: str, targets: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Every other name that a target has after all modules are imported, by a scan of the whole package.

    Only module-level names can be bound by an import, so a method has no bindings. Re-exports are followed.
    Imports inside of functions bind nothing lasting, those under `TYPE_CHECKING` never run: both are left
    out. `import *` counts for every public name.

    Args:
        root: directory of the package.
        package: its dotted name.
        targets: `"pkg.mod:name"` each.

    Returns:
        For each target `"pkg.mod2:name"` of its further bindings, sorted.
    """
    found: dict[str, set[str]] = {target: set() for target in targets}
    origins = {target: target for target in found if len(split_name(target).path) == 1}
    texts = {path: path.read_text("utf-8-sig") for path in sorted(root.rglob("*.py"))} if origins else {}
    trees: dict[Path, ast.Module] = {}
    while origins:
        words = {split_name(text).path[0] for text in origins} | {"import *"}
        fresh: dict[str, str] = {}
        for path, text in texts.items():
            if not any(word in text for word in words):
                continue
            if path not in trees:
                trees[path] = ast.parse(text)
            module = _module_name(path, root, package)
            for source, local in _imports(trees[path], module, is_package=path.name == "__init__.py"):
                source_module, _, name = source.partition(":")
                for bound in _matches(source_module, name, origins):
                    alias = f"{module}:{local if local != '*' else split_name(bound).path[0]}"
                    target = origins[bound]
                    if alias != target and alias not in found[target]:
                        found[target].add(alias)
                        fresh[alias] = target
        origins = fresh
    return {target: tuple(sorted(aliases)) for target, aliases in found.items()}


def _matches(source_module: str, name: str, origins: dict[str, str]) -> Iterator[str]:
    if name != "*":
        if f"{source_module}:{name}" in origins:
            yield f"{source_module}:{name}"
        return
    for bound in origins:
        bound_module, _, bound_name = bound.partition(":")
        if bound_module == source_module and not bound_name.startswith("_"):
            yield bound


def _module_name(path: Path, root: Path, package: str) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[str, str]]:
    """`("pkg.mod:name", local name)` of each from-import that runs when the module is imported."""
    for node in _module_level(tree.body):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            kept = parts[: len(parts) - node.level + is_package]
            base = ".".join((*kept, base) if base else kept)
        for alias in node.names:
            yield f"{base}:{alias.name}", alias.asname or alias.name


def _module_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _module_level(node.orelse)
        elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            yield from _module_level(node.body)
            yield from _module_level(getattr(node, "orelse", ()))
            yield from _module_level(getattr(node, "finalbody", ()))
            for handler in getattr(node, "handlers", ()):
                yield from _module_level(handler.body)


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"
