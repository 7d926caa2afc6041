"""Functions and classes in a file of the user's, given as FILE.py:NAME: `load_reference`, in a worker `load_own`."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

OURS = str(Path(__file__).parent.parent)
FOLDERS = {OURS}  # where the user's files have been loaded from; and ours


@functools.cache
def load_module(file: Path) -> ModuleType:
    """The file as a module, one for all flags and files that name or import it. Raises what the file raises."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if spec and spec.origin and Path(spec.origin).resolve() == file:
        return importlib.import_module(file.stem)
    spec = importlib.util.spec_from_file_location(f"own_{file.stem}", file)  # it may be called math.py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import would: dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def load_reference(reference: str) -> Callable:
    """The function or class of FILE.py:NAME. Raises ValueError if there is none, and what the file itself raises."""
    path, _, name = reference.rpartition(":")
    file = Path(path).absolute()
    folder = str(file.parent)
    FOLDERS.add(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # it can import its neighbours; at the end, because ours keep their names
    try:
        module = load_module(file.resolve())
    except ImportError as error:
        if "relative import" in str(error):
            raise ValueError(f"{path} is in no package: import its neighbours without a dot ({error})") from None
        raise
    for neighbour in files_of(file)[1:]:  # it may get a file of that name from another folder
        part = neighbour.relative_to(folder).parts[0].removesuffix(".py")
        origin = Path(getattr(importlib.util.find_spec(part), "origin", None) or neighbour)
        if str(origin.parents[origin.name == "__init__.py"]) in FOLDERS - {folder}:
            raise ValueError(f"{file} imports its neighbour {part}, but gets {origin}; give one of them another name")
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            each
            for each, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__ and each[0] != "_"
        ]
        raise ValueError(f"{path} has no function or class {name!r}; it has {', '.join(own) or 'none'}.")
    return function


def files_of(path: Path) -> list[Path]:
    """The file, and those in its folder that it imports, directly or not."""
    files = [path]
    for file in files:  # it grows
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # whoever imports it may do without it
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=aliases) | ast.ImportFrom(module=None, names=aliases):
                    names = [alias.name for alias in aliases]
                case ast.ImportFrom(module=module, names=aliases):  # what is taken out of it may be a module, too
                    names = [module, *(f"{module}.{alias.name}" for alias in aliases)]
                case _:
                    continue
            for name in names:
                place = path.parent / name.replace(".", "/")
                for imported in (place.with_suffix(".py"), place / "__init__.py"):
                    if imported.is_file() and imported not in files:
                        files.append(imported)
    return files


def load_own(reference: str) -> tuple[Callable, str]:
    """The function or class of `file.py:name`, and this name, in a worker. Raises as `load_reference`."""
    path, _, name = reference.rpartition(":")
    # Its neighbours come after installed packages and before our own modules: one may be called data.py.
    last = [str(Path(path).absolute().parent), OURS]
    sys.path[:] = [folder for folder in sys.path if folder not in last] + last
    return load_reference(reference), name
