# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_dcp_hybrid.patching import SourceNotFound, SourceTree, package_root


def block(sandbox: Any, text: str, name: str) -> Any:
    sandbox.write("new", text)
    return SourceTree(sandbox.root).block(sandbox.name(f"new:{name}"))


def test_a_module_or_package_is_found_without_importing_it(sandbox: Any) -> None:
    sandbox.write("sub/__init__", "def f(): pass\n")
    tree = SourceTree(sandbox.root)
    assert tree.relative_file_of(sandbox.name("ops")) == f"{sandbox.pkg}/ops.py"
    assert tree.relative_file_of(sandbox.name("sub")) == f"{sandbox.pkg}/sub/__init__.py"
    assert tree.relative_file_of(sandbox.pkg) == f"{sandbox.pkg}/__init__.py"
    assert package_root(sandbox.pkg) == sandbox.root


@pytest.mark.parametrize("target", ["nowhere:f", "ops:nothing", "ops:Runner.nothing", "ops:run", "ops:Runner.kind.cls"])
def test_what_does_not_exist_is_not_found(sandbox: Any, target: str) -> None:
    with pytest.raises(SourceNotFound):
        SourceTree(sandbox.root).find(sandbox.name(target))


def test_a_package_that_is_not_installed_is_not_found() -> None:
    with pytest.raises(SourceNotFound, match="not installed"):
        package_root("no_such_package_anywhere")


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "async def f(x): return x\n",
        "@deco\n@deco.call(\n    1,\n)\n# a comment between\ndef f(x):\n    return x\n",
        "def f(\n    x,\n) -> tuple[\n    int\n]:\n    return x\n",
        "def f(\n    x,  # )\n):  # the end\n    return x\n",
        'def f(x):\n    """Text\nat the margin\ndef g(): pass\n    """\n    return x\n',
        "def f(x):\n# a comment at the margin\n    return x\n",
        "def f(x):\n    return (\n1,\n2)\n",
        "def f(x):\n    return 1 + \\\n2\n",
        "def f(x):\n    return r'\\\\' + '\"\"\"'\n",
        'def f(x):\n    return \'it\\\'s\' "#" # \' """\n',
        "def f(x):\n    return f'{x!r:>{9}} {{'\n",
        "def f(x):\n\n    def g():\n        return 1\n\n    return g\n",
        "def f(x):\n    return '''a'b''c\\''''\n",
        "def f(x):\n\treturn x\n",
        "f = {\n    1: 2,\n}\n",
        "f: dict[int, int] = {\n    1: 2,\n}\n",
        "class f(Base, metaclass=Meta):\n    a = 1\n\n    def g(self):\n        pass\n",
    ],
)
@pytest.mark.parametrize("after", ["", "\n\n# next\nclass Next:\n    pass\n", "x = 1\n"])
@pytest.mark.parametrize("where", ["module", "if", "class"])
def test_a_block_is_what_the_parser_takes_it_for(sandbox: Any, text: str, after: str, where: str) -> None:
    if where != "module":
        inner = "".join(f"    {line}" if line.strip() else line for line in (text + after).splitlines(True))
        source = ("class C:\n" if where == "class" else "if True:\n") + inner
    else:
        source = text + after
    tree = ast.parse(source)
    body = tree.body if where == "module" else tree.body[0].body  # type: ignore[attr-defined]
    expected = ast.get_source_segment(source, body[0]).splitlines()  # type: ignore[union-attr]
    found = block(sandbox, source, "C.f" if where == "class" else "f")
    lines = found.text.splitlines()
    assert [line.strip() for line in lines if not line.startswith("@")][-1].startswith(expected[-1].strip())
    start = next(index for index, line in enumerate(lines) if line.strip() == expected[0].strip())
    assert len(lines) - start == len(expected)
    assert source.splitlines()[found.line - 1].strip() == expected[0].strip()


def test_names_inside_of_strings_and_functions_are_no_definitions(sandbox: Any) -> None:
    text = '"""\ndef f():\n    pass\n"""\ndef outer():\n    def f(): pass\nclass C:\n    def f(self): pass\n'
    with pytest.raises(SourceNotFound):
        block(sandbox, text, "f")


def test_all_definitions_of_a_name_count(sandbox: Any) -> None:
    text = "if A:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n\n"
    text += "try:\n    f = 3\nfinally:\n    pass\n"
    found = block(sandbox, text, "f")
    assert all(f"{value}" in found.text for value in (1, 2, 3))
    assert found.line == 9


def test_a_property_includes_its_setter(sandbox: Any) -> None:
    text = "class C:\n    @property\n    def p(self): pass\n\n    @p.setter\n    def p(self, v): pass\n"
    assert block(sandbox, text, "C.p").decorators == ("property", "p")


def test_the_digest_ignores_position_and_indentation_but_not_decorators(sandbox: Any) -> None:
    plain = "def f():\n    return 1\n"
    one = block(sandbox, plain, "f").digest
    assert block(sandbox, "\n\nx = 1\n" + plain + "\n# more\n", "f").digest == one
    assert block(sandbox, "if x:\n    def f():\n        return 1\n", "f").digest == one
    assert block(sandbox, "@cache\n" + plain, "f").digest != one


def test_line_endings_do_not_matter(sandbox: Any) -> None:
    one = block(sandbox, "def f():\n    return 1\n", "f").digest
    (sandbox.root / "new.py").write_bytes(b"\xef\xbb\xbfdef f():\r\n    return 1\r\n")
    assert SourceTree(sandbox.root).block(sandbox.name("new:f")).digest == one


def test_the_generated_init_of_a_dataclass_is_the_source_of_its_class(sandbox: Any) -> None:
    tree = SourceTree(sandbox.root)
    record = tree.find(sandbox.name("config:Config.__init__"))
    assert record.signature == "generated by class Config"
    assert record.digest == tree.find(sandbox.name("config:Config")).digest
    with pytest.raises(SourceNotFound):
        tree.find(sandbox.name("ops:Base.__init__"))


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        (
            "def f(a, /, b: int = 1, *c, d=(2, 3), **e) -> None: pass\n",
            "def f(a, /, b: int=1, *c, d=(2, 3), **e) -> None",
        ),
        ("async def f(\n    a,  # note\n): # note\n    pass\n", "async def f(a)"),
        ("@deco\nclass f(Base[int]):\n    pass\n", "class f(Base[int])"),
        ("f = [\n  1,\n]\n", "f = ..."),
        ("f: int = 3\n", "f: int"),
    ],
)
def test_signatures_are_normalised(sandbox: Any, text: str, signature: str) -> None:
    assert block(sandbox, text, "f").signature == signature


def definitions(tree: ast.Module) -> list[tuple[str, Any]]:
    """Functions, classes and methods at module level, each name that occurs once."""
    found: list[tuple[str, Any]] = []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds):
            found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            found += [(f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, kinds)]
    names = [name for name, _ in found]
    return [(name, node) for name, node in found if names.count(name) == 1]


@pytest.mark.contract
def test_blocks_of_stock_vllm_are_what_the_parser_takes_them_for() -> None:
    try:
        root = package_root("vllm")
    except SourceNotFound:
        pytest.skip("vLLM is not installed")
    files = sorted((root / "v1").rglob("*.py")) + sorted((root / "config").rglob("*.py"))
    chosen: list[Path] = random.Random(0).sample(files, 60)
    chosen += [root / "v1/worker/gpu_model_runner.py", root / "engine/arg_utils.py", root / "envs.py"]
    num_checked = 0
    for path in chosen:
        text = path.read_text("utf-8")
        lines = text.splitlines()
        tree = SourceTree(root)
        module = ".".join(("vllm", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        for name, node in definitions(ast.parse(text)):
            found = tree.block(f"{module}:{name}")
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            stock = "\n".join(line[node.col_offset :] for line in lines[first - 1 : node.end_lineno])
            where = f"{module}:{name}"
            assert found.line == node.lineno, where
            assert _squeezed(found.text) == _squeezed(stock), where
            node.body, node.decorator_list = [], []
            assert found.signature == ast.unparse(node).strip().removesuffix(":"), where
            num_checked += 1
    assert num_checked > 500


def _squeezed(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
