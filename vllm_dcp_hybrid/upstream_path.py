# SPDX-License-Identifier: Apache-2.0
"""Is upstream's own hybrid DCP the one in use here?  Asked of the objects of this process, not of a version number.

That the installed source is the recorded one is checked when the patches are applied, since the patches that report
lean on every name below.  What remains is whether somebody exchanged an object in memory, or registered a backend.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from vllm_dcp_hybrid import plugin
from vllm_dcp_hybrid.patching import SourceNotFound, SourceTree, mark_of, package_root
from vllm_dcp_hybrid.patching.live import ABSENT, foreign_owner, holder_of, module_of, own_attribute
from vllm_dcp_hybrid.patching.patch import Name, split_name

logger = logging.getLogger("vllm.dcp_hybrid")

# What the line says that a patch adds on GPUs; the others only read, or serve CPUs.
_ADDITIONS = {
    "prefill-chunk-ends": "chunk ends that keep prefix hits in align mode",
    "fresh-recurrent-state": "fresh recurrent states for prompts of one token",
    "whole-block-copies": "whole copies of blocks that a prefix hit shares in part",
}


def log(role: str, parts: Iterable[str], exchanged: dict[str, str]) -> None:
    """The line of one process: an INFO line if all is upstream's, a warning that names what is not.

    Args:
        role: of this process.
        parts: what was looked at, for the reader.
        exchanged: by name of a part, who made what is in use instead.
    """
    status = plugin.status()
    applied = status.feature.patches if status.feature else ()
    entry = status.entry.patches if status.entry else ()
    added = "; ".join(_ADDITIONS[patch.name] for patch in (*entry, *applied) if patch.name in _ADDITIONS) or "nothing"
    if exchanged:
        logger.warning(
            "%s, %s: upstream's own hybrid DCP of vLLM %s is NOT in use as released: %s; this plugin adds: %s",
            status.summary(),
            role,
            status.vllm_version,
            ", ".join(f"{part} is from {owner}" for part, owner in exchanged.items()),
            added,
        )
    else:
        logger.info(
            "%s, %s: upstream's own hybrid DCP of vLLM %s is in use (%s); this plugin adds: %s",
            status.summary(),
            role,
            status.vllm_version,
            ", ".join(parts),
            added,
        )


def exchanged_objects(names: Iterable[str]) -> dict[str, str]:
    """Which of these functions and classes are not those of vLLM's source, and who made what stands in their place.

    Args:
        names: ``"vllm.mod:name"`` each.  Modules that are not loaded are passed over.
    """
    tree = SourceTree(package_root("vllm"))
    found: dict[str, str] = {}
    for text in names:
        name = split_name(text)
        if name.module not in sys.modules:
            continue
        for place, value in _objects(name):
            owner = _owner(place, value, tree)
            if owner is not None:
                found.setdefault(".".join(place.path), owner)
    return found


def _objects(name: Name) -> Iterator[tuple[Name, Any]]:
    """What the name holds; for a class also its methods, for a function also other modules' copies of it."""
    value = own_attribute(holder_of(name), name.path[-1])
    yield name, value
    if isinstance(value, type):
        for attribute, member in vars(value).items():
            if isinstance(member, (FunctionType, staticmethod, classmethod, property)) or _is_proxy(member):
                yield Name(name.module, (*name.path, attribute)), member
    elif len(name.path) == 1:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == name.package:
                copy = vars(module).get(name.path[0], value)
                if copy is not value:
                    yield name, copy


def _owner(place: Name, value: Any, tree: SourceTree) -> str | None:
    if value is ABSENT:
        return "nobody"
    mark = mark_of(value)
    if mark is not None:
        return None if mark.owner == plugin.OWNER else mark.owner
    try:
        tree.block(str(place))
    except SourceNotFound:
        # A class decorator's method, such as a dataclass's; or one that somebody added.
        return None if _is_generated(value) else module_of(value)
    return foreign_owner(place, value, tree)


def _is_generated(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return (
        code is None or code.co_filename.startswith("<") or module_of(value).partition(".")[0] in {"dataclasses", "abc"}
    )


def _is_proxy(value: Any) -> bool:
    return hasattr(type(value), "_self_wrapper")


def exchanged_types(instances: Iterable[Any]) -> dict[str, str]:
    """Which of these objects are of a class from outside of vLLM, and where that class is from."""
    types = {type(instance) for instance in instances}
    return {cls.__name__: cls.__module__ for cls in types if cls.__module__.partition(".")[0] != "vllm"}
