"""The contract matrix: every cell of tests/matrix.py, what is refused, and the table in the docs."""

import pytest
import torch
from matrix import COLUMNS, MARKS, ROWS, compiled, distributed, holds
from matrix_models import REFUSED

from dear_plugin import RoleMap, wrap_clip_with_roles

CELLS = [
    pytest.param(row, column, id=f"{row.name}-{column}", marks=[pytest.mark.slow] if column in row.slow else [])
    for row in ROWS for column in row.only if column != "DDP"
]


@pytest.mark.parametrize(("row", "column"), CELLS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_cell(row, column):
    found, bound = COLUMNS[column](row), row.bound(column)
    assert holds(found, bound), f"{row.name}, {column}: {found}, wanted {bound}"


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_give_the_gradients_of_one_with_the_global_batch(slow):
    rows = [row for row in ROWS if "DDP" in row.only and ("DDP" in row.slow) == slow]
    found = distributed(rows)
    assert set(found) == {row.name for row in rows}
    assert {name: value for row in rows for name, value in [(row.name, found[row.name])]
            if not holds(value, row.bound("DDP"))} == {}


@pytest.mark.slow
def test_compiled_by_inductor():
    row = next(row for row in ROWS if row.library == "open_clip")
    assert holds(compiled(row, backend="inductor"), 1e-5)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_by_name(case):
    clip = case.build()
    before = {name: sorted(vars(module)) for name, module in clip.named_modules()}
    with pytest.raises(ValueError, match=case.words):
        wrap_clip_with_roles(clip, RoleMap.uniform("mixed", layers=[1, 2], heads=2), latent_width=8)
    assert {name: sorted(vars(module)) for name, module in clip.named_modules()} == before


def test_a_difference_and_a_wrong_word_do_not_hold():
    assert holds(0.0, 0.0) and holds("texture", "texture")
    assert not holds(1e-9, 0.0) and not holds("texture, CLIP", "texture") and not holds(float("nan"), 1e-5)


def test_the_table_in_the_docs_has_these_rows(root):
    text = (root / "docs" / "backbones.md").read_text(encoding="utf-8")
    table = text.split(MARKS[0])[1].split(MARKS[1])[0]
    for row in ROWS:
        assert f"| {row.library} | {row.geometry} |" in table, f"run {MARKS[0][13:-4]}"
    for case in REFUSED:
        assert f"| {case.name} |" in table
    assert "**" not in table, "a cell that does not hold"
    assert torch.__version__.split("+")[0] in text.split(MARKS[0])[0], "made with which torch"
