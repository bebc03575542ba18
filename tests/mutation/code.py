"""Changing one expression of a function where it stands, so that whoever has imported the function meets the mutant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """`text` of a function becomes `instead`; `check` must fail then."""

    function: Callable[..., Any]
    text: str
    instead: str
    check: Callable[[], None]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Change the function's code where it stands, so that whoever has imported it meets the mutant."""
    function = inspect.unwrap(mutant.function)
    source = inspect.getsource(function)
    assert source.count(mutant.text) == 1, f"{function.__qualname__} has {mutant.text!r} not once: mend the table"
    module = inspect.getsource(inspect.getmodule(function))
    # From the whole module, so that imports, decorators and indentation are as they were.
    changed = module.replace(source, source.replace(mutant.text, mutant.instead))
    original = function.__code__
    function.__code__ = code_in(compile(changed, original.co_filename, "exec"), original.co_qualname)
    try:
        yield
    finally:
        function.__code__ = original


def code_in(module: CodeType, qualname: str) -> CodeType:
    inside = [each for each in module.co_consts if isinstance(each, CodeType)]
    found = [each for each in inside if each.co_qualname == qualname]
    return found[0] if found else next(code_in(each, qualname) for each in inside if qualname.startswith(each.co_name))
