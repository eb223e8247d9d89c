# SPDX-License-Identifier: Apache-2.0
"""The object that stands where a target stood: it knows its owner, and finds its replacement when called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import wrapt

from vllm_dcp_hybrid.patching.patch import Patch, split_name

if TYPE_CHECKING:
    _BoundFunctionWrapper = wrapt.BoundFunctionWrapper[..., Any]
    _FunctionWrapper = wrapt.FunctionWrapper[..., Any]
else:  # generic from wrapt 2.0 on
    _BoundFunctionWrapper = wrapt.BoundFunctionWrapper
    _FunctionWrapper = wrapt.FunctionWrapper


class Mark(NamedTuple):
    """Who wrapped an object, by which patch."""

    owner: str
    patch: str


def resolve(text: str) -> Any:
    """Import and return `"pkg.mod:Class.name"`."""
    name = split_name(text)
    value: Any = importlib.import_module(name.module)
    for part in name.path:
        value = getattr(value, part)
    return value


class LazyReplacement:
    """A wrapper function that is imported when it is called for the first time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[..., Any] | None = None

    def __call__(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._function is None:
            self._function = resolve(self._name)
        return self._function(wrapped, instance, args, kwargs)


class BoundPatchWrapper(_BoundFunctionWrapper):
    """What access through a class or an instance gives. Pickled by name, as a method is."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        bound_to = getattr(self.__wrapped__, "__self__", None)
        if bound_to is None:
            return resolve, (self._self_parent._self_patch_target,)
        return getattr, (bound_to, self.__wrapped__.__name__)

    def __copy__(self) -> BoundPatchWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundPatchWrapper:
        return self


class PatchWrapper(_FunctionWrapper):
    """A target under a patch. Pickled by name, as a function is (wrapt's own proxies refuse).

    `mark_of` recognises the type by `_self_is_patch_wrapper`, so a second copy of this module in the process
    recognises the wrappers of the first.
    """

    _self_is_patch_wrapper = True
    __bound_function_wrapper__ = BoundPatchWrapper

    def __init__(self, wrapped: Any, patch: Patch, owner: str) -> None:
        super().__init__(wrapped, LazyReplacement(patch.replacement))
        self._self_patch_mark = (owner, patch.name)
        self._self_patch_target = patch.target

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return resolve, (self._self_patch_target,)

    def __copy__(self) -> PatchWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchWrapper:
        return self


def mark_of(value: Any) -> Mark | None:
    """The mark of a `PatchWrapper`; None for any other object, also for one that wraps a `PatchWrapper`."""
    # The real type: attributes and __class__ of a foreign proxy show what it wraps.
    if getattr(type(value), "_self_is_patch_wrapper", False):
        return Mark(*value._self_patch_mark)
    return None
