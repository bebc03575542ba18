"""The shape of the code that `make check` holds: no module over 400 lines, no function over 50; says tests per code."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
ROOMS = ("dflashctl", "remote", "trainer", "templates", "benchmarks")
MODULE_LINES = 400
FUNCTION_LINES = 50


def long_functions(path: Path, source: str) -> Iterator[str]:
    """Yield a complaint for every function over the limit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{path.relative_to(TREE)}:{node.lineno} {node.name} has {lines} lines, {FUNCTION_LINES} are allowed"


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def main() -> int:
    """Print what is out of shape; returns the exit code."""
    complaints: list[str] = []
    sizes: list[int] = []
    for room in ROOMS:
        for path in sorted((TREE / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            sizes.append(len(source.splitlines()))
            complaints += long_functions(path, source)
            if sizes[-1] > MODULE_LINES:
                complaints.append(f"{path.relative_to(TREE)} has {sizes[-1]} lines, {MODULE_LINES} are allowed")
        code, tests = lines_in(TREE / room), lines_in(TREE / "tests" / room)
        print(f"{room:<10} {code:6} lines, {tests:6} of tests")
    print("\n".join(complaints) or f"{len(sizes)} modules in shape, median {statistics.median(sizes):.0f} lines")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
