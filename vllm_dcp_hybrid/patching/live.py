# SPDX-License-Identifier: Apache-2.0
"""Look at the objects of loaded modules: where a name lives, and who made the object that it holds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from vllm_dcp_hybrid.patching.patch import Name
from vllm_dcp_hybrid.patching.source import SourceNotFound, SourceTree
from vllm_dcp_hybrid.patching.wrapper import mark_of

ABSENT: Final = object()
_MAX_LAYERS = 32
# The packages whose class decorators write an __init__.
_GENERATORS = frozenset({"dataclasses", "pydantic", "attr", "attrs"})
# The packages that make the layers of many decorators defined elsewhere.
_DECORATOR_LIBRARIES = frozenset({"contextlib", "functools"})


def holder_of(name: Name) -> Any:
    """The loaded module or class whose own attribute `name` is, `ABSENT` where there is none.

    Nothing is imported, and a module's `__getattr__` is not called.
    """
    holder: Any = sys.modules.get(name.module, ABSENT)
    for part in name.path[:-1]:
        holder = own_attribute(holder, part)
    return holder


def own_attribute(holder: Any, attribute: str) -> Any:
    """The raw object in the `__dict__` of a module or class (a staticmethod as such), or `ABSENT`."""
    if not isinstance(holder, (ModuleType, type)):
        return ABSENT
    return vars(holder).get(attribute, ABSENT)


def is_initializing(module: str) -> bool:
    """Whether a loaded module is still executing, so that it may lack names for now."""
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def foreign_owner(name: Name, value: Any, tree: SourceTree) -> str | None:
    """Who made `value`, the object that `name` holds now; None if the source of its module did.

    The layers of a decorated function must belong to its module, or to the packages of the decorators that
    its source and its class name, and there must be no more layers than decorators.
    """
    module = sys.modules[name.module]
    file = getattr(module, "__file__", None)
    if not _is_same_file(file, str(tree.file_of(name.module))):
        return str(file)
    holder: Any = module
    for part in name.path[:-1]:
        holder = own_attribute(holder, part)
        if holder.__module__ != name.module:
            return str(holder.__module__)
    if isinstance(value, type):
        return None if value.__module__ == name.module else value.__module__
    layers = list(_layers(value))
    if len(layers) == 1 and _is_same_file(_code_file(value), file):
        return None
    try:
        block = tree.block(str(name))
        # A class decorator may exchange methods.
        classes = [tree.block(f"{name.module}:{'.'.join(name.path[:i])}") for i in range(1, len(name.path))]
    except SourceNotFound:
        return module_of(value)
    decorators = [*block.decorators, *(decorator for cls in classes for decorator in cls.decorators)]
    allowed = {name.package, *(_decorator_package(module, decorator) for decorator in decorators)}
    if decorators:
        allowed |= _DECORATOR_LIBRARIES
    if block.is_generated:
        allowed |= _GENERATORS
    for depth, layer in enumerate(layers):
        made_by = module_of(layer)
        is_source = block.is_generated or _is_same_file(_code_file(layer), file)
        if made_by.partition(".")[0] not in allowed or (depth >= len(decorators) and not is_source):
            return made_by
    return None


def module_of(value: Any) -> str:
    """The module whose code `value` runs, however it is disguised by `functools.wraps` or a proxy."""
    mark = mark_of(value)
    if mark is not None:
        return mark.owner
    if hasattr(type(value), "_self_wrapper"):  # a proxy of wrapt: it shows the attributes of what it wraps
        return module_of(value._self_wrapper)
    value = _peel(value)
    if isinstance(value, functools.partial):
        return module_of(value.func)
    module = getattr(value, "__globals__", {}).get("__name__")
    if module is None and isinstance(value, type):
        module = value.__module__
    return str(module or type(value).__module__)


def _layers(value: Any) -> Iterator[Any]:
    """`value`, then what it wraps, and so on inwards."""
    for _ in range(_MAX_LAYERS):
        yield value
        value = getattr(_peel(value), "__wrapped__", ABSENT)
        if value is ABSENT:
            return


def _peel(value: Any) -> Any:
    if type(value) in (staticmethod, classmethod):
        return value.__func__
    return value.fget if type(value) is property else value


def _code_file(value: Any) -> str | None:
    if hasattr(type(value), "_self_wrapper"):
        return None
    return getattr(getattr(_peel(value), "__code__", None), "co_filename", None)


def _is_same_file(one: str | None, other: str | None) -> bool:
    if one is None or other is None:
        return False
    return one == other or Path(one).resolve() == Path(other).resolve()


def _decorator_package(module: ModuleType, decorator: str) -> str:
    made_by = vars(module).get(decorator)
    name = made_by.__name__ if isinstance(made_by, ModuleType) else getattr(made_by, "__module__", None)
    return str(name).partition(".")[0]
