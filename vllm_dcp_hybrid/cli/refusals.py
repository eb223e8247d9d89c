# SPDX-License-Identifier: Apache-2.0
"""What this version refuses, and why: read from the code that refuses it, so that no list can drift.

Some of that code imports vLLM; its literals are read from its source instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from vllm_dcp_hybrid.declarations import Era
from vllm_dcp_hybrid.patching import SourceTree, package_root
from vllm_dcp_hybrid.patching.wrapper import resolve

_SPECS = "vllm_dcp_hybrid.core.kv_cache_specs"
_LAYER_CHECKS = "vllm_dcp_hybrid.worker.layer_checks"


@dataclass(frozen=True)
class Refusal:
    """One thing that is refused before the weights load.

    Attributes:
        what: for a human.
        why: a clause that continues "because".
        remedy: what to do.
        spec: the class name of the KV cache spec, where it is one.
    """

    what: str
    why: str
    remedy: str
    spec: str | None = None


def declared_refusals(era: Era) -> list[Refusal]:
    """All of them in the releases of one era: of the configuration, of KV caches, of layers; each is said once.

    A kind of KV cache may have several classes, by release.
    """
    found = [*_of_configuration(era), *_of_kv_caches(), *_of_layers()]
    return list({(refusal.what, refusal.why): refusal for refusal in reversed(found)}.values())[::-1]


def refusal_of_spec(name: str) -> Refusal | None:
    """The refusal of KV cache specs of this class name; None where they are not refused."""
    return next((refusal for refusal in _of_kv_caches() if refusal.spec == name), None)


def _of_configuration(era: Era) -> Iterator[Refusal]:
    # The rows are made without asking their predicates, so an empty configuration will do.
    nothing = SimpleNamespace(parallel_config=None)
    for function in era.refuses:
        for feature, _, why, remedy in resolve(function)(nothing):
            yield Refusal(feature, why, remedy)


def _of_kv_caches() -> Iterator[Refusal]:
    for spec, kind, why in _literal(_SPECS, "_NOT_YET"):
        yield Refusal(f"{kind[0].upper()}{kind[1:]}", why, "use -dcp 1", spec)


def _of_layers() -> Iterator[Refusal]:
    """The arguments of `UnsupportedAttention(feature=..., why=...)` where they are raised."""
    for node in ast.walk(_parsed(_LAYER_CHECKS)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UnsupportedAttention":
            facts = {
                keyword.arg: keyword.value.value for keyword in node.keywords if isinstance(keyword.value, ast.Constant)
            }
            feature, why = str(facts["feature"]), str(facts["why"])
            yield Refusal(f"{feature[0].upper()}{feature[1:]}", why, "use -dcp 1")


def _literal(module: str, name: str) -> tuple[tuple[str, str, str], ...]:
    """The value of a constant that is written as a literal."""
    block = SourceTree(package_root("vllm_dcp_hybrid")).block(f"{module}:{name}")
    statement = ast.parse(block.text).body[0]
    assert isinstance(statement, (ast.Assign, ast.AnnAssign))
    assert statement.value is not None
    value: tuple[tuple[str, str, str], ...] = ast.literal_eval(statement.value)
    return value


def _parsed(module: str) -> ast.Module:
    return ast.parse(SourceTree(package_root("vllm_dcp_hybrid")).file_of(module).read_text("utf-8"))
