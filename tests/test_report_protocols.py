"""The report beyond one table: protocols apart, averages named, published numbers marked, bootstrap, files."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import report  # noqa: E402
from reports import bootstrap, published, results, tables  # noqa: E402


def write(folder: Path, *, dataset="Shapes", classes="all", seed=1, accuracy=50.0, trainer="DeAR", protocol="",
          shots=16, backbone="tiny", right: list[bool] | None = None) -> None:  # fmt: skip
    path = folder / (protocol or "none") / dataset / classes / trainer / f"{shots}" / f"seed{seed}"
    path.mkdir(parents=True)
    result = {"classes": classes, "seed": seed, "accuracy_pct": accuracy, "split": "test", "dataset": dataset,
              "backbone": backbone, "shots": shots, "trainer": trainer, "wall_time_s": 10.0, "device": "CPU",
              "trainable_parameters": 1234, "config": {"PROTOCOL": protocol}}  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    if right is not None:
        lines = [f"{i}.png,a,b,0.5,0,{0 if one else 1}" for i, one in enumerate(right)]
        (path / "predictions.csv").write_text(
            "\n".join(["path,true,predicted,probability,true_label,predicted_label", *lines]) + "\n")


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    code = report.main()
    return code, *capsys.readouterr()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_both_averages_are_named_and_a_gap_leaves_them_missing(tmp_path, monkeypatch, capsys):
    for dataset, base, new in (("EuroSAT", 90.0, 30.0), ("UCF101", 50.0, 50.0)):
        write(tmp_path, dataset=dataset, classes="base", accuracy=base)
        write(tmp_path, dataset=dataset, classes="new", accuracy=new)
    write(tmp_path, dataset="EuroSAT", classes="base", trainer="CoOp")
    write(tmp_path, dataset="EuroSAT", classes="new", trainer="CoOp")
    code, out, _ = run(monkeypatch, capsys, str(tmp_path))
    rows = [cells(line) for line in out.splitlines() if line.startswith("| average")]
    assert code == 0
    assert rows[0][:5] == ["average", "CoOp", "missing", "missing", "missing"]
    assert rows[1][:5] == ["average, HM of averages", "DeAR", "70.00", "40.00", "50.91"]
    assert rows[2][:5] == ["average of HMs", "DeAR", "", "", "47.50"]


def test_protocols_have_tables_of_their_own(tmp_path, monkeypatch, capsys):
    for classes in ("base", "new"):
        write(tmp_path, classes=classes)
        for changed in ("beta_0", "full", "no_reg"):
            write(tmp_path, classes=classes, protocol=f"ablation:{changed}")
    write(tmp_path, protocol="source", accuracy=80.0)
    targets = {"ShapesColor": 40.0, "ShapesEntity": 60.0, "ShapesTexture": 70.0, "ShapesLocation": 30.0}
    for target, accuracy in targets.items():
        write(tmp_path, dataset=target, protocol="xd", accuracy=accuracy)
    for domain in ("ShapesHard", "ShapesSketch"):  # two of the four domains
        write(tmp_path, dataset=domain, protocol="dg", accuracy=30.0)
    for shots, accuracy in ((1, 20.0), (4, 40.0)):
        for seed in (1, 2):
            write(tmp_path, protocol="fewshot", shots=shots, accuracy=accuracy + seed, seed=seed)
    files = [f"--{kind}={tmp_path / kind}" for kind in ("markdown", "csv", "latex", "plots")]
    code, out, _ = run(monkeypatch, capsys, str(tmp_path), "--plot-format", "svg", *files)
    assert code == 0
    for title in ("base2new, tiny, 16 shots", "ablation, tiny, 16 shots", "xd, tiny, 16 shots", "fewshot, tiny"):
        assert f"\n{title}\n" in out, out
    ablation = out.split("\nablation, tiny")[1].split("\n\n")[1]
    assert [cells(line)[:3] for line in ablation.splitlines()[2:]] == [
        ["full", "Shapes", "DeAR"], ["beta_0", "Shapes", "DeAR"], ["no_reg", "Shapes", "DeAR"]]  # fmt: skip
    assert cells(next(line for line in out.splitlines() if line.startswith("| DeAR"))) == [
        "DeAR", "80.00", "missing", "30.00", "30.00", "missing", "missing", "1 (1)"]  # fmt: skip
    assert "21.50 ± 0.71" in out and "41.50 ± 0.71" in out
    lines = list(csv.reader((tmp_path / "csv").read_text().splitlines()))
    assert ["xd, tiny, 16 shots", "DeAR", "80.00", "40.00", "60.00", "70.00", "30.00", "50.00", "1 (1)"] in lines
    latex = (tmp_path / "latex").read_text()
    assert latex.count("\\begin{tabular}") == 5 and r"21.50 $\pm$ 0.71" in latex and r"base \%" in latex
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "base2new_Shapes_tiny_16.svg", "fewshot_Shapes_tiny.svg"]  # fmt: skip


def test_published_numbers_agree_with_themselves():
    table = published.published_table()
    for trainer in ("ZeroshotCLIP", "CoOp", "CoCoOp", "MaPLe", "PromptSRC"):
        for half in ("base", "new"):
            mean = np.mean([table["base2new", trainer, name, half][0] for name in results.ELEVEN])
            assert mean == pytest.approx(table["base2new", trainer, "Average", half][0], abs=0.011)
        base, new, hm = (table["base2new", trainer, "Average", part][0] for part in ("base", "new", "HM"))
        assert results.harmonic_mean(base, new) == pytest.approx(hm, abs=0.011)
    for trainer in ("CoOp", "CoCoOp", "MaPLe", "PromptSRC"):
        mean = np.mean([table["xd", trainer, name, "all"][0] for name in results.ELEVEN[1:]])
        assert mean == pytest.approx(table["xd", trainer, "Average", "all"][0], abs=0.011)
    assert table["base2new", "DeAR", "Average", "HM"] == (82.72, "S8")


def test_paper_column_is_marked_and_differs_only_on_the_published_backbone(tmp_path, monkeypatch, capsys):
    for backbone in ("tiny", "ViT-B/16"):
        for classes, accuracy in (("base", 98.0), ("new", 94.5)):
            write(tmp_path / backbone, dataset="Caltech101", trainer="MaPLe", classes=classes, accuracy=accuracy,
                  backbone=backbone)  # fmt: skip
    _, out, _ = run(monkeypatch, capsys, str(tmp_path), "--paper")
    vit, tiny = (cells(line) for line in out.splitlines() if line.startswith("| Caltech101"))
    assert vit[-3:] == ["97.74 [S1], here +0.26", "94.36 [S1], here +0.14", "96.02 [S1], here +0.20"]
    assert tiny[-3:] == ["97.74 [S1]", "94.36 [S1]", "96.02 [S1]"]
    assert "[S1] quoted from zhengli97/PromptKD" in out


def test_compare_is_paired_over_images(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    coop = rng.random(400) < 0.5
    dear = coop | (rng.random(400) < 0.2)
    for trainer, right in (("CoOp", coop), ("DeAR", dear)):
        write(tmp_path, trainer=trainer, classes="new", right=list(right), accuracy=100 * float(right.mean()))
    write(tmp_path, trainer="DeAR", classes="base", right=[True])
    code, out, _ = run(monkeypatch, capsys, str(tmp_path), "--compare", "DeAR", "CoOp")
    rows = {cells(line)[2]: cells(line) for line in out.splitlines() if line.startswith("| base2new")}
    wanted = 100 * (dear.mean() - coop.mean())
    assert code == 0 and float(rows["new"][3]) == pytest.approx(wanted, abs=0.005) and rows["new"][5] == "400"
    low, high = map(float, rows["new"][4].split(" to "))
    error = 100 * np.std(dear.astype(float) - coop) / 20  # of a paired mean; unpaired it would be twice as wide
    bounds = (wanted - 1.96 * error, wanted + 1.96 * error)
    assert (low, high) == pytest.approx(bounds, abs=0.4)
    assert rows["base"][3] == "missing"
    code, _, error = run(monkeypatch, capsys, str(tmp_path), "--compare", "DeAR", "MaPLe")
    assert code == 2 and "--compare MaPLe: no result of it" in error


def test_an_interval_without_spread_is_a_point():
    assert bootstrap.interval(np.ones(10)) == (100.0, 100.0, 100.0)


def test_compare_of_other_images_is_refused(tmp_path, monkeypatch, capsys):
    write(tmp_path, trainer="CoOp", classes="new", right=[True, False])
    write(tmp_path, trainer="DeAR", classes="new", right=[True, False, True])
    code, _, error = run(monkeypatch, capsys, str(tmp_path), "--compare", "DeAR", "CoOp")
    assert code == 2 and "were tested on different images" in error


def test_latex_escapes():
    table = tables.Table("a_b", ["x %"], [["1 ± 2"], ["cup & saucer"]])
    latex = tables.as_latex(table)
    assert r"% a\_b" in latex and r"1 $\pm$ 2" in latex and r"x \%" in latex and r"cup \& saucer \\" in latex
