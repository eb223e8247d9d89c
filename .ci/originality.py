# SPDX-License-Identifier: Apache-2.0
"""Runs shared/check_originality.py and accepts only runs of lines that are function signatures.

    python .ci/originality.py ../shared/check_originality.py [--vllm DIR]

A replacement must repeat its target's parameters; nothing else may stand in vLLM too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path


def signature_lines(path: Path) -> set[int]:
    """Numbers of the lines that belong to a function's header, decorators and docstring included.

    Headers that follow each other with nothing but a class line or a docstring between them are one run to the checker.
    """
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
            lines.update(range(first, body[0].lineno))
    return lines


def main() -> int:
    checker, *options = sys.argv[1:]
    if not Path(checker).is_file():
        print(f"{checker} is not here: originality was not checked")
        return 0
    result = subprocess.run([sys.executable, checker, *options], capture_output=True, text=True, check=False)
    print(result.stdout, end="")
    if result.returncode not in (0, 1):
        print(result.stderr, end="")
        return result.returncode
    bad = 0
    for path, first, last in re.findall(r"^(\S+\.py):(\d+)-(\d+)  stands in", result.stdout, re.MULTILINE):
        # The last line of a run may be the first of the body.
        outside = set(range(int(first), int(last))) - signature_lines(Path(path))
        if outside:
            print(f"{path}:{first}-{last} is more than a signature (lines {sorted(outside)})")
            bad += 1
    print(f"{bad} runs that are not signatures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
