"""Imports of optional dependencies."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or raise an ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this needs {module}, which could not be imported ({error}); "
            f"install it with: pip install 'grape-pe[{extra}]'"
        ) from error
