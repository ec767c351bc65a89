"""Learnable tokens, and the schedule by which they enter a tower: inserted at a layer, then replaced or mixed."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dear_plugin.precision import Float32Module


@dataclass(frozen=True)
class TokenSchedule:
    """How K learnable tokens enter a tower; one class for all methods.

    first_layer: the tokens join the sequence at the input of this layer (counted from 0).
    position:    index they are inserted at; None: after the last token.
    then:        before each later layer, "mix": beta * token + (1 - beta) * its output of the layer before (DeAR);
                 "replace": the token anew, the output dropped (MaPLe, PromptSRC, MMRL); "keep": the output goes on.
    in_place:    the tokens overwrite K positions that exist already (MaPLe's text context) and are not taken out.

    Tokens are [K, D] (the same before each layer) or [S, K, D], one row per layer from `first_layer`; with fewer rows
    than layers the outputs go on after the last row.
    """

    first_layer: int
    position: int | None = None
    then: str = "mix"
    beta: float = 1.0
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.first_layer < 0:
            raise ValueError(f"first_layer must be 0 or more, got {self.first_layer}.")
        if self.then not in ("mix", "replace", "keep"):
            raise ValueError(f"then must be 'mix', 'replace' or 'keep', got {self.then!r}.")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if self.in_place and self.position is None:
            raise ValueError("in_place needs the position of the tokens to overwrite.")

    def enter(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [N, L, D], tokens -> [N, L + K, D] (or [N, L, D] in place), before `first_layer`."""
        token = tokens if tokens.dim() == 2 else tokens[0]
        start = self.start(x.shape[1])
        skip = token.shape[0] if self.in_place else 0
        return torch.cat([x[:, :start], _expand(token, x), x[:, start + skip :]], dim=1)

    def refresh(self, x: Tensor, tokens: Tensor, layer: int) -> Tensor:
        """x [N, L + K, D] with the tokens inside -> the same shape, before a `layer` after the first."""
        if self.then == "keep" or (self.then == "mix" and self.beta == 0.0):
            return x
        row = layer - self.first_layer
        if tokens.dim() == 3 and row >= tokens.shape[0]:
            return x
        token = tokens if tokens.dim() == 2 else tokens[row]
        before, inside, after = self._split(x, token.shape[0])
        fresh = _expand(token, x)
        if self.then == "mix" and self.beta < 1.0:
            fresh = self.beta * fresh + (1.0 - self.beta) * inside
        return torch.cat([before, fresh, after], dim=1)

    def leave(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """x [N, L + K, D] -> (x [N, L, D] without the tokens, the tokens' outputs [N, K, D])."""
        before, inside, after = self._split(x, count)
        if self.in_place:
            return x, inside
        return (before if after.shape[1] == 0 else torch.cat([before, after], dim=1)), inside

    def start(self, length: int) -> int:
        """Where the tokens begin in a sequence of `length` other tokens."""
        return length if self.position is None else self.position

    def place(self, index: Tensor, count: int) -> Tensor:
        """Positions without tokens -> the same positions in the sequence with `count` tokens inside."""
        if self.in_place or self.position is None:
            return index
        return torch.where(index < self.position, index, index + count)

    def _split(self, x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        start = self.start(x.shape[1] - count)
        return x[:, :start], x[:, start : start + count], x[:, start + count :]


def _expand(token: Tensor, x: Tensor) -> Tensor:
    """token [K, D] -> [N, K, D] in x's dtype."""
    return token.to(x.dtype).expand(x.shape[0], -1, -1)


class AttributeTokens(Float32Module):
    """DeAR's tokens: one latent per attribute, mapped into each tower (ours: a shared latent couples the two sides).

    R [max(A, K), latent width], drawn from N(0, 0.02). Vision tokens come from the first A latents, text tokens from
    the first K. The maps carry no bias: a bias would be one common token added to all. With `per_layer` there is one
    map for each layer, else one for all.
    """

    def __init__(
        self,
        *,
        attributes: int,
        text_tokens: int,
        latent_width: int,
        vision_width: int,
        text_width: int,
        vision_maps: int = 1,
        text_maps: int = 1,
        per_layer: bool = False,
    ):
        super().__init__()
        self.attributes, self.text_tokens, self.per_layer = attributes, text_tokens, per_layer
        self.latents = nn.Parameter(0.02 * torch.randn(max(attributes, text_tokens), latent_width))
        self.to_vision = _maps(vision_maps if per_layer else 1, latent_width, vision_width) if attributes else None
        self.to_text = _maps(text_maps if per_layer else 1, latent_width, text_width) if text_tokens else None

    def for_vision(self) -> Tensor | None:
        """[A, D] of the vision tower, or [layers, A, D] with a map per layer; None without attributes."""
        return None if self.to_vision is None else self._map(self.to_vision, self.latents[: self.attributes])

    def for_text(self) -> Tensor | None:
        """[K, D] of the text tower, or [layers, K, D] with a map per layer; None without text tokens."""
        return None if self.to_text is None else self._map(self.to_text, self.latents[: self.text_tokens])

    def _map(self, maps: nn.ModuleList, latents: Tensor) -> Tensor:
        rows = [linear(latents) for linear in maps]
        return torch.stack(rows) if self.per_layer else rows[0]


def _maps(count: int, width_in: int, width_out: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width_in, width_out, bias=False, dtype=torch.float32) for _ in range(count))
