"""Everything that DeAR trains, in one module kept in fp32: what an adapter file holds."""

import torch
from torch import Tensor, nn

from dear_plugin.config import DearConfig
from dear_plugin.fusion import TaskAdaptiveFusion
from dear_plugin.precision import Float32Module
from dear_plugin.tokens import AttributeTokens
from dear_plugin.towers import TextTower, VisionTower


class DearAdapter(Float32Module):
    """Attribute tokens, attribute projection [D, E] (unless frozen) and fusion weights.

    `config` has its layers and text tokens filled in. Nothing here depends on the class list.
    """

    def __init__(self, config: DearConfig, vision: VisionTower, text: TextTower):
        super().__init__()
        self.tokens = AttributeTokens(
            attributes=len(config.attributes),
            text_tokens=config.text_tokens,
            latent_width=config.latent_width,
            vision_width=vision.width,
            text_width=text.width,
            vision_maps=vision.layers - config.first_layer,
            text_maps=text.layers - config.text_first_layer,
            per_layer=config.per_layer_maps,
        )
        trained = config.attribute_projection == "trained" and len(config.attributes) > 0
        # contiguous: a Hugging Face projection is the other way round
        projection = vision.proj.detach().to(torch.float32, copy=True).contiguous() if trained else None
        self.register_parameter("attribute_projection", None if projection is None else nn.Parameter(projection))
        self.fusion = TaskAdaptiveFusion(len(config.attributes), config.cls_weight)
        self.to(vision.device)

    def project_attributes(self, vision: VisionTower, outputs: Tensor) -> Tensor:
        """Outputs of the attribute tokens [N, A, D] -> f_k [N, A, E]."""
        if self.attribute_projection is None:
            return vision.project(outputs)
        x = vision.ln_post(outputs)
        return (x.to(self.attribute_projection.dtype) @ self.attribute_projection).to(outputs.dtype)
