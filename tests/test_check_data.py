"""check_data: absent, wrong and complete data sets in the table, with the first missing files."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import check_data  # noqa: E402

from datasets.generate import EUROSAT_NAMES  # noqa: E402


def eurosat(root: Path) -> Path:
    """The published counts as empty files."""
    split, folder = {"train": [], "val": [], "test": []}, root / "eurosat"
    names = EUROSAT_NAMES | {name: name for name in ("Forest", "River")}
    for label, (name, title) in enumerate(sorted(names.items())):
        (folder / "2750" / name).mkdir(parents=True)
        for part, count in (("train", 1350), ("val", 540), ("test", 810)):
            for i in range(count):
                path = f"{name}/{part}{i}.jpg"
                (folder / "2750" / path).touch()
                split[part].append([path, label, title])
    (folder / "split_zhou_EuroSAT.json").write_text(json.dumps(split))
    return folder


def test_complete_wrong_and_absent(tmp_path, capsys):
    folder = eurosat(tmp_path)
    assert check_data.main(["--root", str(tmp_path), "--dataset", "eurosat"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("EuroSAT"))
    assert line.split() == ["EuroSAT", "eurosat", "complete", "13,500", "5,400", "8,100", "10"]
    for i in range(7):
        (folder / "2750" / "River" / f"test{i}.jpg").unlink()
    (tmp_path / "dtd").mkdir()
    assert check_data.main(["--root", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "EuroSAT: 7 of 27,000 images are not in" in out and "River/test0.jpg" in out and "and 2 more" in out
    assert "DescribableTextures: split_zhou_DescribableTextures.json not found in" in out
    assert out.count(" absent ") == 13 and "0 of 15 complete; 13 absent, where to get them: https" in out


def test_a_wrong_root_is_one_sentence(tmp_path, capsys):
    assert check_data.main(["--root", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("check_data.py: no folder")
