"""ZeroshotCLIP: one hand-written sentence a class, nothing trained."""

from __future__ import annotations

from torch import Tensor

from dear_plugin.engine import TRAINER_REGISTRY
from dear_plugin.engine.clip_method import ClipTrainer, cosine_logits


@TRAINER_REGISTRY.register()
class ZeroshotCLIP(ClipTrainer):
    """Plain CLIP with the data set's template. Only evaluation makes sense, and needs no adapter."""

    trains = False
    takes_resnet = True
    frozen_part = "image"

    def build_method(self) -> None:
        pass

    def class_text_features(self) -> Tensor:
        return self.clip.encode_text(self.tokenize(self.prompts()))

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        return cosine_logits(self.frozen_image(images), text, self.clip.logit_scale.exp())
