"""The rules of the house hold, and the check that says so can fail."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("check_house", ROOT / "scripts" / "check_house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_file_breaks_a_rule(house):
    files = house.python_files()
    assert len(files) > 60
    assert [offence for path in files for offence in house.offences(path)] == []


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("dear_plugin/x.py", "import yacs", "dear_plugin/ must not import yacs"),
        ("dear_plugin/x.py", "from dear_plugin.engine import Datum", "must not import dear_plugin.engine.Datum"),
        ("dear_plugin/x.py", "from dear_plugin import analysis", "must not import dear_plugin.analysis"),
        ("dear_plugin/x.py", "import open_clip", "open_clip must be imported inside a function"),
        ("dear_plugin/engine/x.py", "import trainers.dear", "dear_plugin/engine/ must not import trainers.dear"),
        ("datasets/x.py", "from trainers import dear", "datasets/ must not import trainers.dear"),
        ("trainers/x.py", "model.cuda()", "the device follows the input"),
        ("trainers/x.py", "model = model.half()", "the precision follows a setting"),
        ("trainers/x.py", "assert x", "raise an error that says got"),
        ("trainers/x.py", "state = torch.load(path)", "torch.load needs weights_only=True"),
        ("trainers/x.py", "# TO" + "DO later", "finish it"),
        ("trainers/x.py", "raise", "a bare raise belongs in an except block"),
        ("trainers/x.py", "x = 1\n" * 401, "lines, at most 400"),
    ],
)
def test_each_rule_can_fail(house, monkeypatch, tmp_path, name, line, found):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(f'"""One sentence."""\n{line}\n')
    assert any(found in offence for offence in house.offences(path)), house.offences(path)


def test_a_reraise_and_a_lazy_import_are_fine(house, monkeypatch, tmp_path):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / "dear_plugin" / "x.py"
    path.parent.mkdir()
    body = "    try:\n        import open_clip\n    except ImportError:\n        raise\n"
    path.write_text(f'"""One."""\n\ndef f():\n{body}')
    assert house.offences(path) == []


def test_importing_the_library_loads_nothing_heavy():
    heavy = "{'open_clip', 'clip', 'dassl', 'transformers', 'matplotlib', 'sklearn', 'yacs', 'torchvision'}"
    code = (f"import sys, dear_plugin; dear_plugin.wrap_clip_with_roles; "
            f"print(sorted({heavy} & set(sys.modules)))")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_yaml_is_read_and_fits_the_config():
    sys.path.insert(0, str(ROOT / "scripts"))
    import train

    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert len(files) >= 17 + 10
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
        flag = "--dataset-config-file" if path.parent.name == "datasets" else "--config-file"
        train.build_config(train.parse_arguments([flag, str(path)]))


def test_wheel_holds_the_library_with_its_assets_and_nothing_else(tmp_path):
    source = tmp_path / "source"  # a copy: building leaves folders behind
    for name in ("setup.py", "pyproject.toml", "README.md", "dear_plugin", "datasets", "trainers"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    run = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w",
                          str(tmp_path), str(source)], capture_output=True, text=True)
    if run.returncode and "setuptools" in run.stderr:
        pytest.skip(f"no setuptools here to build a wheel with: {run.stderr.strip().splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "dear_plugin"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= names
    assert all(name.startswith(("dear_plugin/", "dear_plugin-")) for name in names)


def test_readme_links_and_commands_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    scripts = set(re.findall(r"(scripts/[\w/]+\.(?:py|sh))", text))
    assert targets and scripts
    assert [t for t in [*targets, *scripts] if not (ROOT / t).exists()] == []
