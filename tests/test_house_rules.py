"""Rules of the house that a machine can check: what may import what, what an import may load, how long things
are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("torchspec/**/*.py"), *ROOT.glob("tools/*.py")])
# A room may import these rooms and itself; the configs (config.py everywhere) stand below all of them.
BELOW = {
    "attention": set(),
    "context_parallel": {"attention"},
    "pipeline": {"attention", "context_parallel"},
    "losses": {"attention", "context_parallel"},
    "optim": {"context_parallel"},
    "policy": {"attention", "context_parallel", "optim", "pipeline"},
    "draft": {"attention", "context_parallel", "losses", "optim", "policy"},
    "data": {"attention", "context_parallel"},
    "rollout": set(),
}
EVERYWHERE = {"config", "errors", "files", "installation", "plugins", "ranks", "rope", "shard", "validation"}


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, but for those that only a type checker sees."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    names: list[str] = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    rooms = {name.split(".")[1] for name in names if name.startswith("torchspec.")}
    return rooms - {path.relative_to(ROOT / "torchspec").parts[0].removesuffix(".py")}


def test_imports_point_downward():
    for path in ROOT.glob("torchspec/**/*.py"):
        room = path.relative_to(ROOT / "torchspec").parts[0]
        rooms = imported_rooms(path)
        assert "trainer" not in rooms, f"{path} imports the trainer"
        if room in BELOW and path.name != "config.py":
            assert rooms <= BELOW[room] | EVERYWHERE, f"{path} imports {rooms - BELOW[room] - EVERYWHERE}"


def test_no_import_loads_the_engine_or_transformers():
    code = (
        "import importlib, pkgutil, sys, torchspec\n"
        "for m in pkgutil.walk_packages(torchspec.__path__, 'torchspec.'):\n"
        "    importlib.import_module(m.name)\n"
        "    heavy = {'vllm', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, (m.name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_configs_and_the_command_load_no_torch():
    code = (
        "import sys\n"
        "import torchspec.config, torchspec.config_file, torchspec.validation, torchspec.train\n"
        "import torchspec.plugins, torchspec.report, torchspec.live, torchspec.metrics\n"
        "assert not {'torch', 'numpy', 'pydantic', 'tyro', 'rich', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path):
    text = path.read_text()
    assert text.isascii()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def test_lines_end_at_120_columns():
    for path in [*FILES, *ROOT.glob("tests/**/*.py")]:
        long = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
        assert not long, f"{path}: lines {long}"
