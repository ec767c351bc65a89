"""Which implementation gives the contract's names: DEAR_ENGINE, a broken installation, a real Dassl if one is given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.builtin


def engine(tmp_path, *, choice="", package=None):
    """Import dear_plugin.engine in a new process, with a package `dassl` of the given text on the path."""
    path = [str(ROOT)]
    if package is not None:
        (tmp_path / "dassl").mkdir()
        (tmp_path / "dassl" / "__init__.py").write_text(package)
        path.append(str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "DEAR_ENGINE": choice}
    code = "from dear_plugin.engine import ENGINE; print(ENGINE)"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_without_dassl(tmp_path):
    assert engine(tmp_path).stdout == "builtin\n"
    forced = engine(tmp_path, choice="dassl")
    assert forced.returncode and "DEAR_ENGINE is dassl, but importing it failed" in forced.stderr
    assert "DEAR_ENGINE is 'dasl'; allowed: builtin, dassl, or unset" in engine(tmp_path, choice="dasl").stderr


def test_a_dassl_that_cannot_be_imported_is_said(tmp_path):
    run = engine(tmp_path, package="import wilds_that_is_missing\n")
    assert run.stdout == "builtin\n"
    assert "dassl is installed but not importable (No module named 'wilds_that_is_missing')" in run.stderr


def test_builtin_is_forced_beside_a_dassl(tmp_path):
    run = engine(tmp_path, choice="builtin", package="raise RuntimeError('imported')\n")
    assert run.stdout == "builtin\n" and not run.stderr


@pytest.mark.skipif("DEAR_PEER_DASSL" not in os.environ, reason="set DEAR_PEER_DASSL to a checkout of Dassl.pytorch")
def test_all_of_this_folder_on_a_real_dassl():
    """The same toy runs, resume and messages on Dassl 0.6.3 with the repairs."""
    environment = {key: value for key, value in os.environ.items() if key != "DEAR_PEER_DASSL"}
    environment["DEAR_ENGINE"] = "dassl"
    environment["PYTHONPATH"] = os.pathsep.join([os.environ["DEAR_PEER_DASSL"], os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "passed" in run.stdout, run.stdout[-3000:]
