"""The CSV and JSONL list: labels, splits, what is refused, and the example of docs/own_data.md as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from datasets.listed import read_list

ROWS = [(f"im äges/{name} {i}.png", name, part) for name in ("dog", "cat", "Übertopf")
        for i, part in enumerate(("train", "train", "val", "test"))]  # fmt: skip


@pytest.fixture
def root(tmp_path, touch):
    touch(tmp_path / "my data", *(path for path, _, _ in ROWS))
    return tmp_path / "my data"


def write(file, rows, *, split: bool = True) -> None:
    keys = ("path", "label", "split") if split else ("path", "label")
    if file.suffix == ".csv":
        file.write_text("\n".join(",".join(row[: len(keys)]) for row in [keys, *rows]) + "\n", encoding="utf-8")
    else:
        file.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=False))) for row in rows), encoding="utf-8")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_list_with_a_split(root, load, suffix):
    write(root / f"list.{suffix}", ROWS)
    data = load("List", root)
    assert data.classnames == ["cat", "dog", "Übertopf"]
    assert [(len(part), part[0].label, part[0].impath) for part in (data.train_x, data.val, data.test)] == [
        (6, 1, str(root / "im äges/dog 0.png")), (3, 1, str(root / "im äges/dog 2.png")),
        (3, 1, str(root / "im äges/dog 3.png"))]  # fmt: skip
    assert data.facts["split_generated"] is False


def test_list_without_a_split_is_split_by_seed_and_marked(root, load, tmp_path):
    write(root / "other.csv", ROWS, split=False)
    first = load("List", root, LIST="other.csv")
    assert (len(first.train_x), len(first.val), len(first.test)) == (6, 3, 3) and first.facts["split_generated"] is True
    again = load("List", root, LIST="other.csv", output=tmp_path / "second")
    assert [x.impath for x in again.test] == [x.impath for x in first.test]
    assert all(os.path.isfile(x.impath) for x in first.train_x + first.val + first.test)


def test_numbers_keep_their_order_and_take_names_from_a_file(root, load, capsys):
    rows = [(path, str({"dog": 2, "cat": 10, "Übertopf": 0}[name]), part) for path, name, part in ROWS]
    write(root / "list.csv", rows)
    assert load("List", root).classnames == ["0", "2", "10"]
    assert "class names look like ids" in capsys.readouterr().out
    (root / "names.txt").write_text("pot\ndog\ncat\n")
    assert load("List", root, CLASSNAMES=str(root / "names.txt")).classnames == ["pot", "dog", "cat"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("file,label\na.png,dog\n", "line 1: wanted the columns path,label[,split], path missing in file,label"),
        ("path,label,split\na.png,dog,trian\n", "line 2: split is 'trian'; wanted train, val or test"),
        ("path,label\na.png,\n", "line 2: path and label must be filled in, got 'a.png' and ''"),
        ("path,label\na.png,dog\na.png,cat\n", "a.png is listed twice (as dog and cat)"),
        ("path,label,split\na.png,dog,train\nb.png,cat,\n", "lines 3 have no split but others have one"),
        ("path,label\n", "has no images"),
    ],
)
def test_refused_with_the_line(tmp_path, text, sentence):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_list(tmp_path / "list.csv", seed=1, output=None)


def test_missing_list_and_missing_image(root, load):
    with pytest.raises(FileNotFoundError, match="DATASET.LIST must name a .csv or .jsonl file"):
        load("List", root)
    write(root / "list.csv", [*ROWS, ("gone.png", "dog", "test")])
    with pytest.raises(FileNotFoundError, match="1 of 13 images are missing .*gone.png"):
        load("List", root)


def test_the_example_of_the_documentation(pytestconfig, tmp_path):
    root = pytestconfig.rootpath
    script = re.search(r"```bash\n(.*?)```", (root / "docs/own_data.md").read_text(encoding="utf-8"), re.S).group(1)
    script = script.replace("python scripts/", f"python {root}/scripts/")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(root), "PATH": path}
    run = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "my_run" / "result.json").read_text())
    assert result["classnames"] == ["blue_cup", "green_cup", "red_cup"] and result["total"] == 6
