"""Optional parts, found by name when a flag, a row or a model asks for them: a folder of `extras/` may be deleted."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent


def check_part(name: str, asked_by: str) -> None:
    """Raises ValueError if this module is not there. Imports nothing."""
    path = ROOT.joinpath(*name.split("."))
    if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists():
        raise ValueError(f"{asked_by}: the folder {path.parent.relative_to(ROOT)} is missing.")


def part(name: str, asked_by: str) -> ModuleType:
    """The module of this name, as in `part("extras.models.lora", "--lora_rank")`. Raises ValueError without it."""
    check_part(name, asked_by)
    return import_module(name)
