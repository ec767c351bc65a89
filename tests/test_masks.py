"""Every cell of the role mask's table (dear_method.md, section 3)."""

import itertools

import pytest
import torch

from dear_plugin.masks import TokenLayout, build_role_mask, refuse_empty_rows
from dear_plugin.roles import HeadInfo, RoleMap

ATTRIBUTES = ("color", "shape", "texture")
OBJECTS = 3  # CLS and two patches
HEADS = {
    "generalization": HeadInfo("generalization"),
    "other": HeadInfo("attribute", "other"),
    "unlisted": HeadInfo("attribute", "size"),
    "core": HeadInfo("attribute", "shape"),
    "mixed": HeadInfo("mixed"),
}


def _expected(kind: str, row: int, column: int, mixing: bool) -> bool:
    """The table, cell by cell: objects are indices below 3, tokens k = index - 3; the core head writes k = 1."""
    from_object, to_object = row < OBJECTS, column < OBJECTS
    isolated = kind in ("generalization", "other", "unlisted")
    if from_object and to_object:
        return True
    if from_object or to_object:  # between objects and token k
        token = (column if from_object else row) - OBJECTS
        return kind == "mixed" or (kind == "core" and token == 1)
    if row == column:
        return True
    return kind == "mixed" or (isolated and mixing)


@pytest.mark.parametrize("kind, mixing", list(itertools.product(HEADS, (True, False))))
def test_every_cell_of_the_table(kind, mixing):
    role_map = RoleMap.from_heads({(7, 0): HEADS[kind]})
    mask = build_role_mask(role_map, 7, TokenLayout(OBJECTS, ATTRIBUTES), mixing)
    length = OBJECTS + len(ATTRIBUTES)
    assert mask.shape == (1, length, length) and mask.dtype == torch.bool
    for row, column in itertools.product(range(length), repeat=2):
        assert bool(mask[0, row, column]) == _expected(kind, row, column, mixing), (row, column)


def test_heads_keep_their_order():
    role_map = RoleMap.from_heads({(0, h): info for h, info in enumerate(HEADS.values())})
    mask = build_role_mask(role_map, 0, TokenLayout(OBJECTS, ATTRIBUTES))
    for head, info in enumerate(HEADS.values()):
        alone = build_role_mask(RoleMap.from_heads({(0, 0): info}), 0, TokenLayout(OBJECTS, ATTRIBUTES))
        assert torch.equal(mask[head], alone[0])


def test_no_layout_gives_an_empty_row():
    for objects, count, kind, mixing in itertools.product((1, 2, 10), (0, 1, 3), HEADS, (True, False)):
        role_map = RoleMap.from_heads({(0, 0): HEADS[kind]})
        mask = build_role_mask(role_map, 0, TokenLayout(objects, ATTRIBUTES[:count]), mixing)
        assert mask.any(dim=-1).all()


def test_an_empty_row_is_refused_by_layer_head_and_row():
    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[1, 2] = False
    with pytest.raises(ValueError, match="role mask of layer 5, head 1: token 2 may read nothing"):
        refuse_empty_rows(mask, 5)


def test_layouts_are_checked():
    assert TokenLayout(4, ["color"]).length == 5
    with pytest.raises(ValueError, match="attribute 'color' appears twice"):
        TokenLayout(4, ("color", "shape", "color"))
    with pytest.raises(ValueError, match="at least the CLS token"):
        TokenLayout(0)
