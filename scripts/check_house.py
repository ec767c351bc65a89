"""`make check`, second half: import directions, file length, banned calls. Prints every offence; exit code 1 if any."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
# Longest matching folder wins: files below it may import nothing of these top-level packages or modules.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "dear_plugin": ("yacs", "dassl", "trainers", "datasets", "scripts", "dear_plugin.engine", "dear_plugin.analysis"),
    "dear_plugin/analysis": ("yacs", "dassl", "trainers", "datasets", "scripts", "dear_plugin.engine"),
    "dear_plugin/engine": ("trainers", "datasets", "scripts", "dear_plugin.analysis"),  # dassl: its bridge is here
    "datasets": ("trainers", "scripts"),
    "trainers": ("scripts",),
}
# Modules that only a function may import: they are slow, optional, or not ours to need.
LAZY = ("open_clip", "clip", "dassl", "transformers", "sentence_transformers", "hdbscan", "matplotlib")
BANNED = {
    r"\.cuda\(": "the device follows the input: use .to(device)",
    r"[\w)\]]\.half\(\)": "the precision follows a setting: use .to(dtype)",
    r"^\s*assert ": "raise an error that says got, wanted, where to fix",
    r"^\s*raise\s*(#.*)?$": "a bare raise belongs in an except block only",
    r"\bTODO\b|\bFIXME\b|\bXXX\b": "finish it, or write it in an issue",
    r"torch\.load\((?!.*weights_only=True)": "torch.load needs weights_only=True on the same line",
    r"\bpickle\.load": "never unpickle a user's file",
}


def python_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def imports(tree: ast.AST, *, top_only: bool) -> list[tuple[int, str]]:
    """(line, dotted module) of every import; with `top_only` those that run when the module is imported."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.extend((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif not (top_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offences(path: Path) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    found = []
    if len(lines) > MAX_LINES:
        found.append(f"{name}: {len(lines)} lines, at most {MAX_LINES}")
    if lines and not ast.get_docstring(tree):
        found.append(f"{name}:1: no module docstring")
    if name.startswith("tests/"):
        return found
    folder = max((key for key in FORBIDDEN if name.startswith(key + "/")), key=len, default="")
    found += [f"{name}:{line}: {folder}/ must not import {module}" for line, module in imports(tree, top_only=False)
              if within(module, FORBIDDEN.get(folder, ()))]
    if name.startswith("dear_plugin/") and "/engine/" not in name:
        found += [f"{name}:{line}: {module} must be imported inside a function"
                  for line, module in imports(tree, top_only=True) if within(module, LAZY)]
    if name == "scripts/check_house.py":
        return found
    reraised = {node.lineno for handler in ast.walk(tree) if isinstance(handler, ast.ExceptHandler)
                for node in ast.walk(handler) if isinstance(node, ast.Raise)}
    for number, line in enumerate(lines, 1):
        for pattern, advice in BANNED.items():
            if re.search(pattern, line) and not (pattern.startswith(r"^\s*raise") and number in reraised):
                found.append(f"{name}:{number}: {line.strip()[:60]}: {advice}")
    return found


def main() -> int:
    files = python_files()
    found = [offence for path in files for offence in offences(path)]
    print("\n".join(found) if found else f"house rules hold in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
