"""What was not run is in every table as `missing`, and numbers are never averaged over less than they say."""

import json
import sys
from pathlib import Path

import pytest
from test_report_protocols import cells, run, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from protocols import jobs  # noqa: E402
from reports import results  # noqa: E402

from datasets.table import ROWS  # noqa: E402

DOMAINS = ("ShapesResampled", "ShapesSketch", "ShapesHard", "ShapesRendition")


def rows_of(text: str, title: str = "") -> dict[str, dict[str, str]]:
    """First cell (and the second, if it names a trainer) -> column -> cell, of the table under `title`."""
    lines = text[text.index(title):].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    head, found = cells(lines[start]), {}
    for line in lines[start + 2:]:
        if not line.startswith("|"):
            break
        row = cells(line)
        found[" ".join(row[:2]) if head[1] == "trainer" else row[0]] = dict(zip(head, row, strict=True))
    return found


def test_columns_are_those_of_the_protocols_job_lists():
    """The report knows the data sets by name, the job lists by file: the same sets, each in its own order."""
    name_of = {row.config: row.name for row in ROWS}
    for (protocol, family), names in results.TARGETS.items():
        wanted = {name_of[stem] for stem in jobs.TARGETS[protocol][family.lower()]}
        assert set(names) == wanted and {results.family_of(name) for name in names} == {family}


def test_a_target_that_one_trainer_lacks(tmp_path, monkeypatch, capsys):
    lacking = {("CoOp", "ShapesHard", 1), ("CoOp", "ShapesHard", 2), ("CoOp", "ShapesSketch", 2)}
    for trainer in ("CoOp", "DeAR"):
        for seed in (1, 2):
            write(tmp_path, protocol="source", accuracy=80.0 + seed, trainer=trainer, seed=seed)
            for i, domain in enumerate(DOMAINS):
                if (trainer, domain, seed) not in lacking:
                    write(tmp_path, dataset=domain, protocol="dg", accuracy=10.0 * i + seed, trainer=trainer, seed=seed)
    code, out, _ = run(monkeypatch, capsys, str(tmp_path))
    found = rows_of(out)
    assert code == 0 and list(found["DeAR"]) == [
        "trainer", "Shapes (source)", *DOMAINS, "average of 4 targets", "n (seeds)"]  # fmt: skip
    assert list(found["DeAR"].values()) == ["DeAR", "81.50 ± 0.71", "1.50 ± 0.71", "11.50 ± 0.71", "21.50 ± 0.71",
                                            "31.50 ± 0.71", "16.50", "2 (1, 2)"]
    assert list(found["CoOp"].values()) == ["CoOp", "81.50 ± 0.71", "1.50 ± 0.71", "missing", "missing", "31.50 ± 0.71",
                                            "missing", "2 (1, 2)"]
    assert "Note: CoOp (dg, tiny, 16 shots): not all of the seeds 1, 2 on ShapesSketch, ShapesHard" in out
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--incomplete")
    row = rows_of(out)["CoOp"]
    assert row["ShapesSketch"] == "11.00 (n=1)" and row["ShapesHard"] == row["average of 4 targets"] == "missing"


def test_a_target_that_no_trainer_has_and_a_source_alone(tmp_path, monkeypatch, capsys):
    write(tmp_path, dataset="ImageNetV2", protocol="dg", backbone="ViT-B/16")
    write(tmp_path, dataset="ImageNet", protocol="source", backbone="ViT-B/16", trainer="CoOp", accuracy=70.0)
    code, out, _ = run(monkeypatch, capsys, str(tmp_path))
    found = rows_of(out)
    assert code == 0 and list(found) == ["CoOp", "DeAR"]
    assert list(found["DeAR"].values()) == ["DeAR", "missing", "50.00", *["missing"] * 4, "1 (1)"]
    assert list(found["CoOp"].values()) == ["CoOp", "70.00", *["missing"] * 5, "1 (1)"]


def test_transfer_from_imagenet_and_from_shapes_are_two_tables(tmp_path, monkeypatch, capsys):
    for name in (*results.TARGETS["xd", "ImageNet"], *results.TARGETS["xd", "Shapes"], "Folder"):
        write(tmp_path, dataset=name, protocol="xd", accuracy=90.0 if name.startswith("Shapes") else 20.0)
    code, out, _ = run(monkeypatch, capsys, str(tmp_path))
    heads = [cells(line) for line in out.splitlines() if line.startswith("| trainer")]
    assert code == 0 and [head[-2] for head in heads] == [
        "average of 1 targets", "average of 10 targets", "average of 4 targets"]  # fmt: skip
    assert [cells(line)[-2] for line in out.splitlines() if line.startswith("| DeAR")] == ["20.00", "20.00", "90.00"]


def test_a_data_set_that_one_trainer_lacks_has_its_row(tmp_path, monkeypatch, capsys):
    for trainer, dataset in (("CoOp", "EuroSAT"), ("DeAR", "EuroSAT"), ("DeAR", "UCF101")):
        for classes in ("base", "new"):
            write(tmp_path, dataset=dataset, classes=classes, trainer=trainer)
        write(tmp_path, dataset=dataset, trainer=trainer, protocol="fewshot", shots=4)
    _, out, _ = run(monkeypatch, capsys, str(tmp_path))
    row = rows_of(out, "\nbase2new,")["UCF101 CoOp"]
    assert [row[name] for name in ("base %", "new %", "HM")] == ["missing"] * 3
    assert rows_of(out, "\nfewshot,")["UCF101 CoOp"] == {
        "data set": "UCF101", "trainer": "CoOp", "4 shots": "missing", "n (seeds)": "0"}  # fmt: skip
    assert rows_of(out, "\nfewshot,")["average CoOp"]["4 shots"] == "missing"


def test_few_shot_seeds_are_counted_by_which_and_not_by_how_many(tmp_path, monkeypatch, capsys):
    for shots, seeds in ((1, (1, 2)), (4, (2, 3)), (16, (1, 2, 3))):
        for seed in seeds:
            write(tmp_path, protocol="fewshot", shots=shots, seed=seed, accuracy=10.0 * seed)
    _, out, _ = run(monkeypatch, capsys, str(tmp_path))
    assert list(rows_of(out)["Shapes DeAR"].values())[2:] == ["missing", "missing", "20.00 ± 10.00", "3 (1, 2, 3)"]
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--incomplete")
    assert list(rows_of(out)["Shapes DeAR"].values())[2:5] == [
        "15.00 ± 7.07 (n=2)", "25.00 ± 7.07 (n=2)", "20.00 ± 10.00"]  # fmt: skip


def test_the_deviation_is_the_samples_and_hm_is_of_unrounded_means(tmp_path, monkeypatch, capsys):
    base, new = (90.004, 71.5, 83.3), (60.1, 50.456, 41.0)
    for seed, pair in enumerate(zip(base, new, strict=True), 1):
        for classes, accuracy in zip(("base", "new"), pair, strict=True):
            write(tmp_path, classes=classes, accuracy=accuracy, seed=seed)
    row = rows_of(run(monkeypatch, capsys, str(tmp_path))[1])["Shapes DeAR"]
    means = [sum(values) / 3 for values in (base, new)]
    assert row["base %"] == "81.60 ± 9.37"  # divided by n - 1; by n it would be 7.65
    assert row["HM"] == f"{2 / (1 / means[0] + 1 / means[1]):.2f}" and row["n (seeds)"] == "3 (1, 2, 3)"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots_are_pictures_with_every_trainer_in_them(suffix, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (optional, for --plots)")
    for trainer in ("CoOp", "DeAR"):
        for shots in (1, 16):
            write(tmp_path, protocol="fewshot", shots=shots, trainer=trainer)
        for classes in ("base", "new"):
            write(tmp_path, classes=classes, trainer=trainer)
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    code, out, _ = run(monkeypatch, capsys, str(tmp_path), "--plots", str(tmp_path / "plots"), "--plot-format", suffix)
    files = sorted((tmp_path / "plots").iterdir())
    assert code == 0 and out.count("Plot: ") == 2 == len(files)
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG") if suffix == "png" else all(
            name in content for name in (b"<svg", b"CoOp", b"DeAR"))


def test_a_user_sees_which_splits_were_made_here(tmp_path, monkeypatch, capsys):
    for classes in ("base", "new"):
        write(tmp_path, dataset="EuroSAT", classes=classes)
    for file in tmp_path.rglob("result.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"data": {"split_generated": True}}))
    _, out, _ = run(monkeypatch, capsys, str(tmp_path))
    assert "Note: the split of EuroSAT was generated here: no number compares with it" in out


def test_one_protocol_and_where_it_was_measured(tmp_path, monkeypatch, capsys):
    write(tmp_path, protocol="source", accuracy=80.0)
    write(tmp_path, dataset="ShapesHard", protocol="dg")
    write(tmp_path, classes="base", protocol="ablation:no_reg")
    write(tmp_path, classes="base")
    for commit, file in zip(("a" * 40, "b" * 40), sorted((tmp_path / "dg").rglob("result.json")) + sorted(
            (tmp_path / "source").rglob("result.json")), strict=True):  # fmt: skip
        facts = {"git": {"commit": commit, "dirty": commit[0] == "b"}, "versions": {"torch": "9.9"}, "wall_time_s": 90}
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    code, out, _ = run(monkeypatch, capsys, str(tmp_path), "--protocol", "dg", "--markdown", str(tmp_path / "dg.md"))
    wanted = "Measured here on: CPU, torch 9.9, commit aaaaaaa, bbbbbbb with changes, 2 runs of 3 min in all."
    assert code == 0 and wanted in out and wanted in (tmp_path / "dg.md").read_text()
    assert "base %" not in out and list(rows_of(out)) == ["DeAR"]
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--protocol", "ablation")
    assert "base %" in out and out.count("| Shapes") == 1 and "ablation:no_reg" in out
    code, _, error = run(monkeypatch, capsys, str(tmp_path), "--protocol", "xd")
    assert code == 2 and f"no finished xd result below {tmp_path}" in error


def test_published_transfer_numbers_stand_below_and_a_gap_has_no_difference(tmp_path, monkeypatch, capsys):
    for trainer in ("MaPLe", "DeAR"):
        write(tmp_path, dataset="ImageNet", protocol="source", accuracy=71.0, trainer=trainer, backbone="ViT-B/16")
        for name in results.TARGETS["xd", "ImageNet"]:
            if (trainer, name) != ("MaPLe", "EuroSAT"):
                write(tmp_path, dataset=name, protocol="xd", accuracy=67.0, trainer=trainer, backbone="ViT-B/16")
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--paper", "--protocol", "xd")
    maple, dear = (rows_of(out)[f"{name}, paper"] for name in ("MaPLe", "DeAR"))
    assert maple["ImageNet (source)"] == "70.72 [S4], here +0.28" and maple["SUN397"] == "67.01 [S2], here -0.01"
    assert maple["EuroSAT"] == "48.06 [S2]" and maple["average of 10 targets"] == "66.30 [S2]"
    assert dear["average of 10 targets"] == "67.60 [S8], here -0.60" and dear["EuroSAT"] == ""
    assert "[S4] quoted from" in out and "[S1]" not in out
