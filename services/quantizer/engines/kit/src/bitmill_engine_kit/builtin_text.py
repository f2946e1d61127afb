"""Text that needs no download: what comes with Python itself, in two parts that never meet.

Documentation comes first: the language reference's topics, then the docstrings of the standard library, then, for
those who ask for more than there is of both, its source code. Every HELD_OUT_EVERY-th topic and module is kept for the
evaluation and never calibrated with.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

HELD_OUT_EVERY = 5
# Not part of every installation, or not prose and code as people write it.
_LEFT_OUT = frozenset(
    {"dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)


def calibration_documents(seed: int) -> Iterator[str]:
    """Documents to calibrate with, in an order that the seed decides within each kind."""
    generator = random.Random(seed)  # noqa: S311 (an order, not a secret)
    return _documents(generator, held_out=False)


def held_out_documents() -> Iterator[str]:
    """Documents to evaluate with, in a fixed order."""
    return _documents(None, held_out=True)


def _documents(generator: random.Random | None, *, held_out: bool) -> Iterator[str]:
    def part(everything: list[str]) -> list[str]:
        chosen = [one for index, one in enumerate(everything) if (index % HELD_OUT_EVERY == 0) == held_out]
        if generator is not None:
            generator.shuffle(chosen)
        return chosen

    # Several names lead to one topic: split by text, or a topic could be in both parts.
    yield from part(sorted(set(topics.topics.values())))
    library = Path(sysconfig.get_path("stdlib"))
    modules = part(_module_paths(library))
    for module in modules:
        if docstrings := _docstrings((library / module).read_bytes()):
            yield "\n\n".join(docstrings)
    for module in modules:
        yield (library / module).read_text(encoding="utf-8", errors="replace")


def _module_paths(library: Path) -> list[str]:
    """Paths of the standard library's modules below its directory, sorted."""
    paths = (path.relative_to(library) for path in library.rglob("*.py"))
    # _sysconfigdata holds the settings of the machine that built this Python.
    kept = (path for path in paths if not (_LEFT_OUT & set(path.parts) or path.name.startswith("_sysconfigdata")))
    return sorted(path.as_posix() for path in kept)


def _docstrings(source: bytes) -> list[str]:
    """Docstrings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]
