"""The repository's own linter, on small packages made to break one rule each."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HEADER = '"""A module.\n\nRuns in: {where}.\n"""\n'

Check = Callable[..., list[str]]


def load_linter() -> ModuleType:
    path = REPOSITORY / "scripts" / "check_layers.py"
    spec = importlib.util.spec_from_file_location("check_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_layers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LINTER = load_linter()


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Write modules (name: source, all said to run in the trainer) and give the findings."""

    def run(where: str = "trainer", **sources: str) -> list[str]:
        root = tmp_path / "mpwriter"
        root.mkdir()
        for name, source in sources.items():
            (root / f"{name}.py").write_text(HEADER.format(where=where) + source)
        return [f"{f.path.stem} {f.rule} {f.text}" for f in LINTER.findings(tmp_path)]

    return run


def test_check_finds_nothing_when_imports_run_downward(check: Check) -> None:
    assert check(_writer="from mpwriter import _pool\n", _pool="import mpwriter.errors\n") == []


@pytest.mark.parametrize(
    "source",
    [
        "from mpwriter import _writer",
        "import mpwriter._writer",
        "from mpwriter._writer import W",
        "def f():\n    from mpwriter import _writer",
        "try:\n    pass\nexcept OSError:\n    from mpwriter import _writer",
    ],
)
def test_check_finds_an_import_when_it_runs_upward(check: Check, source: str) -> None:
    (found,) = check(_storage=source, _writer="")
    assert found.startswith("_storage layer")


def test_check_finds_an_import_when_rooms_lie_side_by_side(check: Check) -> None:
    (found,) = check(_worker="from mpwriter import _arena", _arena="")
    assert "_worker may not import _arena" in found


def test_check_lets_modules_of_one_room_import_each_other(check: Check) -> None:
    assert check(_storage="from mpwriter import _storage_swap", _storage_swap="") == []


def test_check_finds_a_circle_when_it_lies_within_a_room(check: Check) -> None:
    found = check(
        _storage="from mpwriter import _storage_swap", _storage_swap="from mpwriter import _storage"
    )
    assert any("in a circle" in line for line in found)


def test_check_finds_a_module_when_it_has_no_place(check: Check) -> None:
    (found,) = check(_new_room="")
    assert "_new_room has no place in LAYERS" in found


def test_check_finds_torch_when_a_module_runs_in_a_worker(check: Check) -> None:
    (found,) = check("both", _types="from torch import Tensor")
    assert found.startswith("_types torch")


def test_check_finds_torch_when_the_worker_imports_it_indirectly(check: Check) -> None:
    found = check(_worker="from mpwriter import _compat", _compat="import torch")
    assert any(line.startswith("_compat torch") for line in found)


def test_check_lets_torch_pass_when_it_is_for_types_or_for_extensions(check: Check) -> None:
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    late = "def unpack():\n    import torch\n"
    assert check(_worker=typing_only + late) == []


@pytest.mark.parametrize(
    "use",
    [
        "import torch._utils",
        "from torch.distributed._shard import x",
        "from torch.x import _y",
        "import torch as t\nt.z._y()",
        "import torch\ngetattr(torch, '_y')",
        "import torch\ndef f(x): return x._local_tensor",
    ],
)
def test_check_finds_a_private_name_of_torch(check: Check, use: str) -> None:
    (found,) = check(_staging=use)
    assert found.startswith("_staging private")


def test_check_lets_private_names_pass_when_they_are_our_own(check: Check) -> None:
    source = "import os, torch\nclass A:\n    def f(self, b): self._c = os._exit; return b._c\n"
    assert check(_staging=source) == []
    assert LINTER.KNOWN_PRIVATE


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_storage_utils", ""),
        ("_storage", "class PoolManager: ..."),
        ("_storage", "class FileInfo: ..."),
        ("_storage", "def helper(): ..."),
        ("_storage", "class A:\n    def process(self): ..."),
    ],
)
def test_check_finds_a_name_that_says_nothing(check: Check, name: str, source: str) -> None:
    (found,) = check(**{name: source})
    assert " name " in found


def test_check_lets_a_name_pass_when_a_base_class_imposes_it(check: Check) -> None:
    assert check(_storage="class F(Base):\n    def info(self): ...") == []


def test_check_finds_a_docstring_when_it_does_not_say_where_it_runs(check: Check) -> None:
    (found,) = check("somewhere", _storage="")
    assert found.startswith("_storage docstring")


def test_main_fails_and_names_the_line_when_there_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpwriter").mkdir()
    (tmp_path / "mpwriter" / "_types.py").write_text(
        HEADER.format(where="trainer") + "import mpwriter._pool\n"
    )
    (tmp_path / "mpwriter" / "_pool.py").write_text(HEADER.format(where="trainer"))
    assert LINTER.main([str(tmp_path)]) == 1
    assert "_types.py:5: layer:" in capsys.readouterr().out
