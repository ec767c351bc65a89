"""The report: harmonic means from unrounded means, seeds counted, gaps named."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import report  # noqa: E402


def write(folder: Path, classes: str, seed: int, accuracy: float | None, trainer: str = "DeAR") -> None:
    path = folder / classes / trainer / f"seed{seed}"
    path.mkdir(parents=True)
    result = {"classes": classes, "seed": seed, "accuracy_pct": accuracy, "split": "test", "dataset": "Shapes",
              "backbone": "tiny", "shots": 16, "trainer": trainer, "wall_time_s": 10.0, "trainable_parameters": 1234,
              "device": "CPU"}
    (path / "result.json").write_text(json.dumps(result))


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    code = report.main()
    return code, *capsys.readouterr()


def test_table(tmp_path, monkeypatch, capsys):
    for seed, base, new in ((1, 80.0, 60.0), (2, 90.0, 50.0)):
        write(tmp_path, "base", seed, base)
        write(tmp_path, "new", seed, new)
    write(tmp_path, "base", 1, 40.0, "ZeroshotCLIP")
    write(tmp_path, "new", 1, 0.0, "ZeroshotCLIP")
    code, out, _ = run(monkeypatch, capsys, str(tmp_path), "--markdown", str(tmp_path / "table.md"))
    assert code == 0
    rows = {line.split("|")[2].strip(): [cell.strip() for cell in line.split("|")[3:-1]]
            for line in out.splitlines() if line.startswith("| Shapes")}
    assert rows["DeAR"] == ["85.00 ± 7.07", "55.00 ± 7.07", "66.79", "2 (1, 2)", "1,234", "10"]
    assert rows["ZeroshotCLIP"][:4] == ["40.00", "0.00", "0.00", "1 (1)"]  # no spread of one value; HM of 0 is 0
    assert list(rows) == ["ZeroshotCLIP", "DeAR"]
    assert (tmp_path / "table.md").read_text().strip() in out


def test_an_incomplete_set_of_seeds_is_not_averaged_unless_told(tmp_path, monkeypatch, capsys):
    for classes, seed in (("base", 1), ("base", 2), ("base", 3), ("new", 1), ("new", 3)):
        write(tmp_path, classes, seed, 50.0)
    _, out, _ = run(monkeypatch, capsys, str(tmp_path))
    assert "missing" in out and "seed 2 has only one half" in out
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--incomplete")
    assert "50.00 ± 0.00" in out and "2 (1, 3)" in out


def test_broken_and_doubled_results_are_named(tmp_path, monkeypatch, capsys):
    write(tmp_path, "base", 1, 50.0)
    write(tmp_path, "new", 1, 50.0)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "result.json").write_text('{"accuracy_pct": 5')
    _, out, _ = run(monkeypatch, capsys, str(tmp_path))
    assert "cut/result.json is no result (JSONDecodeError" in out
    write(tmp_path / "again", "base", 1, 60.0)
    code, _, error = run(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and "two results for" in error and str(tmp_path / "again") in error


def test_an_empty_folder_is_one_sentence(tmp_path, monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and error == f"report.py: no finished base or new result below {tmp_path}\n"


@pytest.mark.parametrize(("base", "new", "wanted"), [(72.43, 68.14, 70.22), (50.0, 0.0, 0.0)])
def test_harmonic_mean(base, new, wanted):
    assert report.harmonic_mean(base, new) == pytest.approx(wanted, abs=0.005)
