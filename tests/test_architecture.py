"""Imports point one way. When this fails, redesign or move the line: do not add an exception."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hapi"

# package or module -> what of hapi it may import. `errors` is a leaf that everyone may use.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "distributed": set(),
    "metrics": set(),
    "datasets": set(),
    "summary": set(),
    "export": set(),
    "data": {"distributed"},
    "engine": {"distributed", "metrics", "data"},
    "callbacks": {"engine.state"},
    "resolve": {"callbacks", "engine", "metrics"},
    "model": {"callbacks", "engine", "data", "metrics", "distributed", "resolve", "export", "summary"},
    "tune": {"model", "callbacks", "engine"},
    "launch": {"distributed"},
    "board": {"callbacks", "distributed"},
    "__init__": {"callbacks", "data", "datasets", "distributed", "engine", "metrics", "model", "summary", "tune"},
}
HEAVY = {
    "visualdl",
    "tensorboardX",
    "tensorboard",
    "pandas",
    "matplotlib",
    "torchmetrics",
    "sklearn",
    "PIL",
    "onnx",
} | {
    "wandb",
    "mlflow",
    "pynvml",
    "psutil",
}
MODULES = sorted(ROOT.rglob("*.py"))


def owner(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path, *, everywhere: bool) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    found: list[tuple[str, int]] = []
    nodes = ast.walk(tree) if everywhere else _outside_functions(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def _outside_functions(tree: ast.AST) -> list[ast.AST]:
    out: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            out.append(node)
            out += _outside_functions(node)
    return out


def test_every_module_has_a_place() -> None:
    assert {owner(path) for path in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    mine = owner(path)
    for name, line in imports(path, everywhere=True):
        parts = name.split(".")
        if parts[0] != "hapi" or len(parts) < 2:
            continue
        target = parts[1]
        allowed = ALLOWED[mine] | {mine, "errors"}
        fits = target in allowed or any(name.startswith(f"hapi.{entry}") for entry in allowed if "." in entry)
        assert fits, f"{path.relative_to(ROOT)}:{line} imports {name}; {mine} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_optional_packages_are_imported_when_used(path: Path) -> None:
    for name, line in imports(path, everywhere=False):
        assert name.split(".")[0] not in HEAVY, f"{path.relative_to(ROOT)}:{line} imports {name} at import time"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_import_only_optional_packages(path: Path) -> None:
    at_top = set(imports(path, everywhere=False))
    for name, line in set(imports(path, everywhere=True)) - at_top:
        assert not name.startswith("hapi"), f"{path.relative_to(ROOT)}:{line} imports {name} inside a function"


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    for path in MODULES:
        if path.name != "__init__.py":
            assert path.name in page or f"{path.parent.name}/" in page, f"docs/architecture.md lacks {path.name}"


def test_import_adds_few_modules_to_torch() -> None:
    lines = "import sys, torch; before = set(sys.modules); import hapi; print(*set(sys.modules) - before)"
    added = subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True, text=True).stdout.split()
    assert len(added) < 250
    assert not {name.split(".")[0] for name in added} & HEAVY
