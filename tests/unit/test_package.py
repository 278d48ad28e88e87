"""The package's front: what it offers, and what importing it costs."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpwriter

PACKAGE = Path(mpwriter.__file__).parent


def modules_after(statement: str) -> set[str]:
    """Names in sys.modules after `statement` has run in a new interpreter."""
    program = f"import sys\nsys.path.insert(0, {str(PACKAGE.parent)!r})\n{statement}\n"
    program += "print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50
    )
    return set(run.stdout.split())


def worker_side_modules() -> list[str]:
    return sorted(
        path.stem
        for path in PACKAGE.glob("*.py")
        if re.search(r"^Runs in: (worker|both)\b", path.read_text(), re.MULTILINE)
        and path.stem != "__init__"
    )


def test_import_loads_neither_torch_nor_fsspec() -> None:
    assert modules_after("import mpwriter").isdisjoint({"torch", "fsspec", "numpy"})


def test_import_loads_no_torch_when_a_module_runs_in_a_worker() -> None:
    """Invariant 6: a worker starts without torch."""
    names = ", ".join(f"mpwriter.{name}" for name in worker_side_modules())
    assert "torch" not in modules_after(f"import {names}")


@pytest.mark.parametrize("name", mpwriter.__all__)
def test_public_name_is_found_when_first_used(name: str) -> None:
    assert getattr(mpwriter, name) is not None
    assert name in dir(mpwriter)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FsspecWriter'"):
        mpwriter.FsspecWriter  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    assert mpwriter.__version__ == importlib.metadata.version("mpwriter")


def test_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
