"""Checks the rules of this repository that no general linter knows.

    layer      a module imports from lower layers and from its own room only, never in a circle
    torch      what a worker process imports is free of torch
    private    private names of torch appear in _compat.py only
    name       modules, functions and classes have names that say something
    docstring  every module says in which process it runs

Usage: check_layers.py [REPOSITORY]. Prints one line for each finding; exit code 1 if there are any.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "mpwriter"

# From the top down. A layer has rooms side by side, which do not import each other; a room is one
# module, or several that were split from one. "_x" also covers every module named "_x_...".
LAYERS: list[list[set[str]]] = [
    [{"__main__"}],
    [{"cli", "_cli"}],
    [{"_verify", "_inspect"}, {"bench"}],
    [{"_writer", "_save", "_commit", "_feed", "_lane"}, {"_reader", "_fetch"}],
    [
        {"_pool", "_process"},
        {
            *("_staging", "_streams", "_staged_state", "_staged_views"),
            *("_state_staging", "_state_tensors", "_crossing"),
        },
        {"_planning"},
    ],
    [
        {"_worker", "_job", "_readjob"},
        {
            *("_arena", "_admission", "_allocator", "_holdings", "_leasing"),
            *("_pinning", "_segment", "_shortage"),
        },
    ],
    [
        {"_container", "_decode", "_safetensors", "_tensor", "_zipread"},
        {
            *("_storage", "_credentials", "_direct", "_faults", "_filesystems"),
            *("_leftovers", "_publish"),
            *("_multipart", "_ranges", "_redact", "_retry", "_sink"),
        },
        {"_metadata"},
        {"_channel"},
        {"_options"},
    ],
    [{"_report"}, {"_compat"}, {"_memory"}, {"_checksum"}, {"_collector"}],
    [{"_types"}],
    [{"errors"}, {"_version"}],
]
ROOT = "__init__"  # finds its names lazily, so it may name any module, and every module imports it

COMPAT = "_compat"
WORKER = "_worker"
# Jobs with extensions need torch in the worker: these modules may import it inside a function.
LATE_TORCH = {"_worker", "_job"}

FORBIDDEN_WORDS = {"data", "info", "helper", "helpers", "manager", "util", "utils"}
FORBIDDEN_FUNCTIONS = FORBIDDEN_WORDS | {"process"}

# Private by their spelling, yet documented, or not torch's.
KNOWN_PRIVATE = {"_asdict", "_fields", "_make", "_replace", "_strip_protocol", "_extensions"}


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Import:
    """One imported name: `module` as it is written, `name` what was taken from it, if anything."""

    module: str
    name: str | None
    alias: str
    line: int
    runtime: bool  # False under `if TYPE_CHECKING:`
    late: bool  # inside a function

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclass
class Module:
    path: Path
    name: str  # dotted, below the package: "_arena", "bench.table"; "" for a script
    tree: ast.Module
    imports: list[Import]

    @property
    def room_name(self) -> str:
        return self.name.split(".")[0]


def load(path: Path, name: str) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return Module(path, name, tree, list(find_imports(tree.body, runtime=True, late=False)))


def find_imports(body: list[ast.stmt], *, runtime: bool, late: bool) -> Iterator[Import]:
    """All imports below `body`; there are no relative ones, the linter forbids them."""
    for node in body:
        if isinstance(node, ast.Import):
            for item in node.names:
                alias = item.asname or item.name.split(".")[0]
                yield Import(item.name, None, alias, node.lineno, runtime, late)
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                alias = item.asname or item.name
                yield Import(node.module or "", item.name, alias, node.lineno, runtime, late)
        else:
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            inner_late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                inner_runtime = runtime and not (typing_only and part == "body")
                for block in getattr(node, part, []):
                    inner = [block] if isinstance(block, ast.stmt) else block.body
                    yield from find_imports(inner, runtime=inner_runtime, late=inner_late)


def place(room_name: str) -> tuple[int, int] | None:
    """Layer and room of a module, (0, 0) at the top; None if the table has no place for it."""
    fitting = [
        (len(known), (depth, index))
        for depth, rooms in enumerate(LAYERS)
        for index, room in enumerate(rooms)
        for known in room
        if room_name == known or room_name.startswith(known + "_")
    ]
    return max(fitting)[1] if fitting else None


def imported_rooms(module: Module) -> Iterator[tuple[str, Import]]:
    """Modules of the package that `module` imports, by the first part of their dotted names."""
    for imported in module.imports:
        parts = imported.dotted.split(".")
        if parts[0] == PACKAGE and len(parts) > 1:
            yield parts[1], imported


def check_layers(modules: list[Module]) -> Iterator[Finding]:
    known = {module.room_name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        if module.name == ROOT:
            continue
        here = place(module.room_name)
        if here is None:
            text = f"{module.name} has no place in LAYERS of {Path(__file__).name}: add it"
            yield Finding(module.path, 1, "layer", text)
            continue
        for target, imported in imported_rooms(module):
            there = place(target)
            if target not in known or there is None or target == module.room_name:
                continue  # a public name of the package, a missing module, or the same package
            graph.setdefault(module.room_name, set()).add(target)
            if there != here and there[0] <= here[0]:
                text = f"{module.name} may not import {target}, which is not below it"
                yield Finding(module.path, imported.line, "layer", text)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        text = "imports in a circle: " + " > ".join(error.args[1])
        yield Finding(modules[0].path.parent, 0, "layer", text)


def stated_process(module: Module) -> str | None:
    docstring = ast.get_docstring(module.tree) or ""
    stated = re.search(r"^Runs in: (trainer|worker|both)\b", docstring, re.MULTILINE)
    return stated[1] if stated else None


def worker_side(modules: list[Module]) -> list[Module]:
    """The worker's module, all that it imports in turn, and all that say they run in a worker."""
    waiting = [
        m
        for m in modules
        if m.room_name in {WORKER, ROOT} or stated_process(m) in {"worker", "both"}
    ]
    found: list[Module] = []
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.append(module)
            at_once = {r for r, i in imported_rooms(module) if i.runtime and not i.late}
            waiting += [m for m in modules if m.room_name in at_once]
    return found


def check_worker_is_free_of_torch(modules: list[Module]) -> Iterator[Finding]:
    for module in worker_side(modules):
        for imported in module.imports:
            if not imported.runtime or imported.module.split(".")[0] != "torch":
                continue
            if imported.late and module.room_name in LATE_TORCH:
                continue
            text = f"{module.name} runs in a worker and imports {imported.dotted}"
            yield Finding(module.path, imported.line, "torch", text)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in KNOWN_PRIVATE


def own_names(modules: list[Module]) -> set[str]:
    """Every name that this code itself gives to something."""
    names: set[str] = set()
    for node in (node for module in modules for node in ast.walk(module.tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names |= {str(c.value) for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return names


def private_uses(module: Module, own: set[str]) -> Iterator[tuple[int, str]]:
    torch_aliases = {i.alias for i in module.imports if i.module.split(".")[0] == "torch"}
    other_aliases = {i.alias for i in module.imports} - torch_aliases | {"self", "cls"}
    for imported in module.imports:
        parts = imported.dotted.split(".")
        if parts[0] == "torch" and any(is_private(part) for part in parts):
            yield imported.line, imported.dotted
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node.value).split(".")[0].split("(")[0]
            # Of an object whose type is unknown: torch's if nobody here gave it that name.
            if root in torch_aliases or (
                torch_aliases and root not in other_aliases and node.attr not in own
            ):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            match node.args:
                case [subject, ast.Constant(value=str(name)), *_] if is_private(name):
                    if ast.unparse(subject).split(".")[0] in torch_aliases:
                        yield node.lineno, ast.unparse(node)


def check_private_names(modules: list[Module]) -> Iterator[Finding]:
    own = own_names([module for module in modules if module.name != COMPAT])
    for module in modules:
        if module.name == COMPAT:
            continue
        for line, use in private_uses(module, own):
            text = f"{use} is private to torch: reach it through {COMPAT}.py"
            yield Finding(module.path, line, "private", text)


def words(name: str) -> set[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", name)
    return set(spaced.lower().split())


def check_names(module: Module) -> Iterator[Finding]:
    for word in words(module.path.stem) & FORBIDDEN_WORDS:
        yield Finding(module.path, 1, "name", f"a module may not be named {word!r}")
    nodes = list(ast.walk(module.tree))
    # A method's name may be imposed by a base class.
    imposed = {
        id(child)
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.bases
        for child in node.body
    }
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for word in words(node.name) & FORBIDDEN_WORDS:
                text = f"class {node.name} has {word!r} in its name"
                yield Finding(module.path, node.lineno, "name", text)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.strip("_") in FORBIDDEN_FUNCTIONS and id(node) not in imposed:
                text = f"a function may not be named {node.name!r}"
                yield Finding(module.path, node.lineno, "name", text)


def check_docstring(module: Module) -> Iterator[Finding]:
    if stated_process(module) is None:
        text = "the module docstring has no line 'Runs in: trainer | worker | both'"
        yield Finding(module.path, 1, "docstring", text)


def findings(repository: Path) -> list[Finding]:
    """All that is wrong in `repository`, in the order of files and lines."""
    root = repository / PACKAGE
    package = [
        load(path, ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
        for path in sorted(root.rglob("*.py"))
    ]
    scripts = [load(path, "") for path in sorted((repository / "scripts").glob("*.py"))]
    found = [
        *check_layers(package),
        *check_worker_is_free_of_torch(package),
        *check_private_names(package + scripts),
        *(finding for module in package + scripts for finding in check_names(module)),
        *(finding for module in package for finding in check_docstring(module)),
    ]
    return sorted(found, key=lambda finding: (str(finding.path), finding.line))


def main(arguments: list[str]) -> int:
    repository = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = findings(repository)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
