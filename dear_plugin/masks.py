"""Role masks: from a role map and a token layout to a boolean [H, L, L], True where a token may attend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dear_plugin.roles import HeadInfo, HeadRole, RoleMap


@dataclass(frozen=True)
class TokenLayout:
    """Order of a vision sequence: `objects` = CLS and patches (1 + P), then one token per attribute."""

    objects: int
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", tuple(self.attributes))
        if self.objects < 1:
            raise ValueError(f"a layout needs at least the CLS token, got objects={self.objects}.")
        repeated = sorted({a for a in self.attributes if self.attributes.count(a) > 1})
        if repeated:
            raise ValueError(f"attribute {repeated[0]!r} appears twice in {list(self.attributes)}.")

    @property
    def length(self) -> int:
        """L = 1 + P + A."""
        return self.objects + len(self.attributes)


def build_role_mask(role_map: RoleMap, layer: int, layout: TokenLayout, token_mixing: bool = True) -> Tensor:
    """The role mask of one layer, boolean [H, L, L]; entry [h, i, j]: in head h, token i may read token j.

    Rules per head (paper, section on the role-based mask):
    - mixed: everything reads everything;
    - attribute head of a token attribute a: objects read objects and t_a; t_a reads objects and itself;
      every other token reads itself alone;
    - generalization head, and attribute head of any other attribute: objects read objects; tokens read tokens
      (with `token_mixing` False each token reads itself alone: ours).
    """
    mask = torch.stack(
        [_head_mask(role_map.role(layer, head), layout, token_mixing) for head in range(role_map.heads)]
    )
    refuse_empty_rows(mask, layer)
    return mask


def refuse_empty_rows(mask: Tensor, layer: int) -> None:
    """A row that may read nothing gives zeros or NaN in attention, depending on the path torch takes: refuse it."""
    empty = (~mask.any(dim=-1)).nonzero()
    if len(empty):
        head, row = (int(i) for i in empty[0])
        raise ValueError(
            f"role mask of layer {layer}, head {head}: token {row} may read nothing; every token must keep itself."
        )


def _head_mask(info: HeadInfo, layout: TokenLayout, token_mixing: bool) -> Tensor:
    objects, length = layout.objects, layout.length
    if info.role is HeadRole.MIXED:
        return torch.ones(length, length, dtype=torch.bool)
    mask = torch.eye(length, dtype=torch.bool)
    mask[:objects, :objects] = True
    if info.role is HeadRole.ATTRIBUTE and info.attribute in layout.attributes:
        token = objects + layout.attributes.index(info.attribute)
        mask[:objects, token] = True
        mask[token, :objects] = True
    elif token_mixing:
        mask[objects:, objects:] = True
    return mask
