# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter knows, checked on the syntax trees of the package."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vllm_dcp_hybrid

ROOT = Path(vllm_dcp_hybrid.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
MAX_LINES = 500

# Where the DCP size may be multiplied or divided by, beside core/, geometry.py and placement.py, and why.
OWN_ARITHMETIC = {
    "geometry.py": "the one place",
    "placement.py": "the one place",
    "worker/slot_mapping.py": "kernels: the rule of placement.py a second time, for tensors, tested against it",
    "attention/upstream_contract.py": "a function of vLLM 0.26, by its own definition",
    "attention/exchange.py": "splits heads over ranks, not tokens",
    "engine/checks.py": "which sizes are legal at all",
    "cli/demo.py": "which sizes are legal at all",
    "cli/model_shape.py": "bytes of a model that is planned from its config, without vLLM's specs",
}
SIZE_NAMES = {"dcp_world_size", "num_shards", "dcp_size", "decode_context_parallel_size", "dcp"}
ALLOWED_FOLDERS = ("core/",)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

Finder = Callable[[ast.Module], Iterator[ast.AST]]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_from_vllm(tree: ast.Module) -> set[str]:
    """Names that a file binds to vLLM's modules, classes and functions, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] == "vllm"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root_name(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def targets_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    return node.targets if isinstance(node, ast.Delete) else []


def assignments_to_vllm(tree: ast.Module) -> Iterator[ast.AST]:
    """`vllm_thing.attribute = ...`, `del`, and `setattr(vllm_thing, ...)`."""
    names = imported_from_vllm(tree)
    for node in ast.walk(tree):
        for target in targets_of(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and root_name(target) in names:
                yield node
        is_setter = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr")
        if is_setter and node.args and root_name(node.args[0]) in names:  # type: ignore[attr-defined]
            yield node


def swallowed_import_errors(tree: ast.Module) -> Iterator[ast.AST]:
    """Handlers that catch a failed import, or everything, and do nothing."""
    caught = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            names = {leaf.id for leaf in ast.walk(node.type) if isinstance(leaf, ast.Name)} if node.type else caught
            if names & caught and all(isinstance(line, (ast.Pass, ast.Continue)) for line in node.body):
                yield node
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "suppress":
            leaves = [leaf for arg in node.args for leaf in ast.walk(arg)]
            if any(isinstance(leaf, ast.Name) and leaf.id in caught for leaf in leaves):
                yield node


def prints(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node


def eager_log_calls(tree: ast.Module) -> Iterator[ast.AST]:
    """Messages that are formatted although nobody may read them; on a GPU, `{tensor}` waits for it."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS):
            continue
        if "log" not in str(getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))).lower():
            continue
        for arg in node.args:
            is_eager = isinstance(arg, ast.JoinedStr) or (
                isinstance(arg, ast.BinOp) and isinstance(arg.op, (ast.Mod, ast.Add)) and is_text(arg.left)
            )
            is_formatted = isinstance(arg, ast.Call) and getattr(arg.func, "attr", "") == "format"
            if is_eager or (is_formatted and is_text(arg.func.value)):  # type: ignore[attr-defined]
                yield node


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def arithmetic_with_the_dcp_size(tree: ast.Module) -> Iterator[ast.AST]:
    """`x * dcp_world_size` and its like: products, quotients, remainders, also in place."""
    operators = (ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, operators):
            sides = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, operators):
            sides = [node.target, node.value]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("divmod", "cdiv"):
            sides = list(node.args)
        else:
            continue
        # Of a string, % is formatting.
        if is_text(sides[0]):
            continue
        leaves = [leaf for side in sides for leaf in ast.walk(side)]
        if any(getattr(leaf, "attr", getattr(leaf, "id", None)) in SIZE_NAMES for leaf in leaves):
            yield node


def broken(files: dict[str, Path], find: Finder) -> list[str]:
    return [f"{name}:{getattr(node, 'lineno', 0)}" for name, path in files.items() for node in find(parse(path))]


def test_vllm_is_changed_by_the_patching_mechanism_alone() -> None:
    """Statically: names that a file itself imports from vLLM.  Objects handed to a wrapper are its own business."""
    files = {name: path for name, path in FILES.items() if not name.startswith("patching/")}
    assert broken(files, assignments_to_vllm) == []


def test_no_failed_import_is_swallowed() -> None:
    assert broken(FILES, swallowed_import_errors) == []


def test_only_the_command_line_prints() -> None:
    assert broken({name: path for name, path in FILES.items() if not name.startswith("cli/")}, prints) == []


def test_log_messages_are_formatted_by_the_logger() -> None:
    assert broken(FILES, eager_log_calls) == []


def test_only_the_geometry_multiplies_or_divides_by_the_dcp_size() -> None:
    files = {
        name: path
        for name, path in FILES.items()
        if name not in OWN_ARITHMETIC and not name.startswith(ALLOWED_FOLDERS)
    }
    assert broken(files, arithmetic_with_the_dcp_size) == []


def test_no_exception_of_that_rule_has_become_needless() -> None:
    for name in OWN_ARITHMETIC.keys() - {"placement.py", "attention/exchange.py"}:
        assert broken({name: FILES[name]}, arithmetic_with_the_dcp_size), name


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_its_licence_first(name: str) -> None:
    assert FILES[name].read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_too_long_to_be_about_one_thing(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("find", "wrong", "right"),
    [
        (assignments_to_vllm, "import vllm.envs as envs\nenvs.X = 1", "import vllm\nx = vllm.Y"),
        (assignments_to_vllm, "from vllm.a import B\nB.c['d'] = 1", "from other import B\nB.c = 1"),
        (assignments_to_vllm, "def f():\n  from vllm import a\n  setattr(a.b, 'c', 1)", "setattr(x, 'c', 1)"),
        (assignments_to_vllm, "from vllm import a\ndel a.b", "from vllm import a\ndel a"),
        (
            swallowed_import_errors,
            "try:\n  import a\nexcept ImportError:\n  pass",
            "try:\n  f()\nexcept KeyError:\n  pass",
        ),
        (
            swallowed_import_errors,
            "for x in y:\n  try:\n    f()\n  except (KeyError, Exception):\n    continue",
            "try:\n  import a\nexcept ImportError as error:\n  raise X from error",
        ),
        (swallowed_import_errors, "try:\n  f()\nexcept:\n  pass", "try:\n  f()\nexcept:\n  raise"),
        (
            swallowed_import_errors,
            "with contextlib.suppress(ImportError):\n  import a",
            "with suppress(KeyError):\n  f()",
        ),
        (prints, "print(1)", "console.print(1)"),
        (eager_log_calls, "logger.info(f'{x}')", "logger.info('%s', x)"),
        (eager_log_calls, "self.logger.debug('%s' % x)", "parser.error(f'{x}')"),
        (eager_log_calls, "logging.warning('{}'.format(x))", "logging.warning('x', extra={})"),
        (arithmetic_with_the_dcp_size, "a = b * self.dcp_world_size", "a = b + dcp_world_size"),
        (arithmetic_with_the_dcp_size, "a //= group.num_shards", "a //= num_layers"),
        (arithmetic_with_the_dcp_size, "a = divmod(b, dcp_size)", "a = '%d' % dcp_size"),
    ],
    ids=str,
)
def test_the_rules_themselves_tell_wrong_from_right(find: Finder, wrong: str, right: str) -> None:
    assert list(find(ast.parse(wrong)))
    assert not list(find(ast.parse(right)))
