"""The evaluator's printed lines, its numbers, and top-k accuracy."""

import pytest
import torch
from sklearn.metrics import f1_score

from dear_plugin.engine import EVALUATOR_REGISTRY, build_evaluator, compute_accuracy
from dear_plugin.engine.evaluation import macro_f1_pct

NAMES = {0: "cat", 1: "dog", 2: "owl"}


def logits_of(predictions, classes=3):
    return torch.nn.functional.one_hot(torch.tensor(predictions), classes).float()


def test_lines_and_numbers(make_cfg, capsys, tmp_path):
    (tmp_path / "out").mkdir()
    cfg = make_cfg("TEST.PER_CLASS_RESULT", True)
    evaluator = build_evaluator(cfg, lab2cname=NAMES)
    evaluator.process(logits_of([0, 0, 1, 1]), torch.tensor([0, 0, 1, 0]))
    evaluator.process(logits_of([2] * 8), torch.tensor([2] * 8))
    results = evaluator.evaluate()
    assert list(results) == ["accuracy", "error_rate", "macro_f1", "perclass_accuracy"]
    assert results["accuracy"] == pytest.approx(100 * 11 / 12)
    assert capsys.readouterr().out.splitlines() == [
        "=> result",
        "* total: 12",
        "* correct: 11",
        "* accuracy: 91.7%",
        "* error: 8.3%",
        "* macro_f1: 82.2%",
        "=> per-class result",
        "* class: 0 (cat)\ttotal: 3\tcorrect: 2\tacc: 66.7%",
        "* class: 1 (dog)\ttotal: 1\tcorrect: 1\tacc: 100.0%",
        "* class: 2 (owl)\ttotal: 8\tcorrect: 8\tacc: 100.0%",
        "* average: 88.9%",
    ]
    evaluator.reset()
    evaluator.process(logits_of([1] * 2000), torch.tensor([1] * 2000))
    evaluator.evaluate()
    assert "* total: 2,000" in capsys.readouterr().out


@pytest.mark.builtin
def test_confusion_matrix_loads_without_unpickling(make_cfg, tmp_path):
    (tmp_path / "out").mkdir()
    evaluator = EVALUATOR_REGISTRY.get("Classification")(make_cfg("TEST.COMPUTE_CMAT", True), lab2cname=NAMES)
    evaluator.process(logits_of([0, 1, 1, 2]), torch.tensor([0, 0, 1, 2]))
    evaluator.evaluate()
    matrix = torch.load(tmp_path / "out" / "cmat.pt", weights_only=True)
    assert matrix.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]


def test_macro_f1_equals_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (200,), generator=generator)
    labels[labels == 3] = 4  # a class that occurs among the predictions only
    predictions = torch.randint(0, 6, (200,), generator=generator)
    wanted = f1_score(labels, predictions, average="macro", labels=labels.unique().numpy())
    assert macro_f1_pct(labels.numpy(), predictions.numpy()) == pytest.approx(100 * wanted)


def test_compute_accuracy():
    logits = torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.15, 0.05], [0.2, 0.3, 0.5], [0.4, 0.35, 0.25]])
    top1, top2 = compute_accuracy(logits, torch.tensor([1, 1, 2, 2]), topk=(1, 2))
    assert top1.shape == (1,) and top1.item() == 50.0 and top2.item() == 75.0
