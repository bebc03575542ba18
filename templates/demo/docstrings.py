"""Prompts from documentation: signature and docstring of public functions, and questions in prose about them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

# Modules that act when they are imported, or need what a plain machine lacks.
_NEVER = {
    "antigravity",
    "this",
    "idlelib",
    "turtle",
    "turtledemo",
    "tkinter",
    "lib2to3",
    "test",
    "msilib",
    "winreg",
    "__main__",
}
# Licences: Python PSF-2.0; the other three BSD-3-Clause.
_PACKAGES = ("sympy", "networkx", "numpy")
_LONGEST = 700


def documented(packages: tuple[str, ...] = _PACKAGES) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name, prompt) for documented functions of the standard library and of `packages`."""
    seen: set[int] = set()
    for name in _module_names(packages):
        module = _import(name)
        if module is None:
            continue
        for function_name, function in sorted(vars(module).items(), key=lambda item: item[0]):
            if function_name.startswith("_") or id(function) in seen or not _documented_here(function, name):
                continue
            seen.add(id(function))
            prompt = _prompt(function_name, function)
            if prompt is not None:
                yield name, function_name, prompt


def questions(entries: list[tuple[str, str, str]]) -> Iterator[str]:
    """Yield questions in prose about documented functions, in turn of a few forms."""
    forms = (
        "What does the function {name} of the Python module {module} do?",
        "Explain in simple words: {summary}",
        "Write a Python function that does the following: {summary}",
        "Give a short example that uses {name} from {module} in Python.",
        "How would you implement {name} in Python? It should do this: {summary}",
        "Write a test for a function {name} with this description: {summary}",
    )
    for number, (module, name, prompt) in enumerate(entries):
        summary = prompt.split('"""')[1].strip().split("\n\n")[0].replace("\n    ", " ")
        if 20 <= len(summary) <= 200:
            yield forms[number % len(forms)].format(name=name, module=module, summary=summary)


def _module_names(packages: tuple[str, ...]) -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names):
        if not name.startswith("_") and name not in _NEVER:
            yield name
    for package in ("collections", "concurrent.futures", "email", "json", "logging", "os", "urllib", "xml", *packages):
        root = _import(package)
        if root is None or not hasattr(root, "__path__"):
            continue
        for info in pkgutil.walk_packages(root.__path__, package + ".", onerror=lambda _: None):
            if not re.search(
                r"\.(_|tests?\b|benchmarks|conftest|this$|__main__|f2py|distutils|testing|plotting|external)", info.name
            ):
                yield info.name


def _import(name: str) -> types.ModuleType | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules are documentation too
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, AttributeError):
            return None  # a module of another platform, or one with an optional dependency


def _documented_here(function: Any, module: str) -> bool:
    doc = getattr(function, "__doc__", None)
    root = module.partition(".")[0]
    home = getattr(function, "__module__", None) or ""
    return inspect.isroutine(function) and isinstance(doc, str) and len(doc) > 40 and home.lstrip("_").startswith(root)


def _prompt(name: str, function: Any) -> str | None:
    try:
        signature = str(inspect.signature(function))
    except (ValueError, TypeError):
        return None  # built in C without a text signature
    if len(signature) > 120 or "<" in signature or "0x" in signature:
        return None
    doc = inspect.getdoc(function) or ""
    text = _first_part(doc)
    if '"""' in text or len(text) < 40:
        return None
    body = "\n".join("    " + line if line.strip() else "" for line in text.splitlines())
    return f'def {name}{signature}:\n    """{body.strip()}\n    """\n'


def _first_part(doc: str) -> str:
    """Return the first paragraphs up to a limit, and the first doctest where there is one."""
    head = re.split(r"\n(?=(?:Parameters|Returns|Arguments|See Also|Notes|References)\n[-=]{3})", doc)[0]
    paragraphs = head.split("\n\n")
    text = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(text) + len(paragraph) > _LONGEST // 2 or re.match(r"(Examples?|Usage)\n", paragraph):
            break
        text += "\n\n" + paragraph
    example = re.search(r"(?:^ *>>> (?!from|import).*\n(?:^ *(?!\s*>>>)\S.*\n?)+)+", doc, re.MULTILINE)
    if example and example.group(0) not in text:
        text += "\n\n" + inspect.cleandoc(example.group(0))
    return text if len(text) <= _LONGEST else paragraphs[0]
