"""Task-adaptive fusion of the CLS and attribute features, and DeAR's loss terms by name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_plugin.encoder import ImageFeatures
from dear_plugin.precision import Float32Module


class TaskAdaptiveFusion(Float32Module):
    """Weights alpha = softmax(a) over {CLS, A attributes}, learned on the base classes (paper, section on fusion).

    `attributes`: their number A, or their names. alpha of CLS starts at `cls_weight`, the rest is shared (ours).
    """

    def __init__(self, attributes: int | tuple[str, ...] | list[str], cls_weight: float = 0.7):
        super().__init__()
        count = attributes if isinstance(attributes, int) else len(attributes)
        if not 0.0 < cls_weight < 1.0:
            raise ValueError(f"cls_weight must lie strictly between 0 and 1, got {cls_weight}.")
        weights = [cls_weight] + [(1.0 - cls_weight) / count] * count if count else [1.0]
        self.logits_alpha = nn.Parameter(torch.tensor(weights, dtype=torch.float32).log())  # a [1 + A]

    def weights(self) -> Tensor:
        """alpha [1 + A], sums to 1; the first is the CLS feature's."""
        return self.logits_alpha.softmax(dim=0)

    def forward(self, features: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
        """features [N, 1 + A, E] (CLS first), text [C, E] -> logits [N, C] = sum_k alpha_k * scale * cos(f_k, t_c).

        In fp32 even under autocast: at a scale of 100 a bf16 cosine is wrong by whole logits.
        """
        if features.shape[1] != self.logits_alpha.shape[0]:
            raise ValueError(
                f"fusion has {self.logits_alpha.shape[0]} weights (CLS first), got {features.shape[1]} features."
            )
        with torch.autocast(device_type=features.device.type, enabled=False):
            image = F.normalize(features.float(), dim=-1)
            # The weighted sum of cosines is one product with the weighted sum of unit features.
            image = (self.weights()[:, None] * image).sum(dim=1)  # [N, E]
            return scale * image @ F.normalize(text.float(), dim=-1).t()


def loss_terms(
    *,
    logits: Tensor,
    labels: Tensor,
    image: ImageFeatures,
    text: Tensor,
    frozen_text: Tensor | None,
    fusion: TaskAdaptiveFusion,
    lambda_reg: float,
    lambda_fusion: float,
) -> dict[str, Tensor]:
    """DeAR's loss by term (paper): total = ce + lambda_reg * reg + lambda_fusion * fusion, each a scalar in fp32.

    reg = (1 - mean cos(f_cls, frozen f_cls)) + (1 - mean cos(t_c, frozen t_c)) (ours); fusion = -log alpha_cls (paper).
    logits [N, C], labels [N], text and frozen_text [C, E]. With lambda_reg 0 reg is 0 and needs no frozen features.
    """
    ce = F.cross_entropy(logits.float(), labels)
    reg = torch.zeros_like(ce)
    if lambda_reg:
        if image.frozen_cls is None or frozen_text is None:
            raise ValueError(
                f"lambda_reg is {lambda_reg}, but frozen features are missing: call image_features(images, "
                "frozen=True) and hand over the prefix's frozen text features, or set lambda_reg to 0."
            )
        reg = _cosine_distance(image.cls, image.frozen_cls) + _cosine_distance(text, frozen_text)
    fusion_term = -F.log_softmax(fusion.logits_alpha, dim=0)[0]
    return {"ce": ce, "reg": reg, "fusion": fusion_term, "total": ce + lambda_reg * reg + lambda_fusion * fusion_term}


def _cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rows of 1 - cos, of a and b [N, E]."""
    return 1.0 - F.cosine_similarity(a.float(), b.float(), dim=-1).mean()
