"""DeAR: attribute tokens that only the heads of their role may read (CVPR 2026, arXiv 2603.01111)."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from yacs.config import CfgNode

from dear_plugin.adapter import save_adapter
from dear_plugin.config import DearConfig
from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes
from dear_plugin.engine.config import own
from dear_plugin.engine.distributed import by_classes
from dear_plugin.fusion import loss_terms
from dear_plugin.roles import HeadRole, RoleMap
from dear_plugin.towers import vision_tower
from dear_plugin.wrap import wrap_clip_with_config

# Fields of DearConfig whose key has another name or another way of saying "derived from the model".
_SPECIAL = {
    "first_layer": ("START_LAYER", 0),  # counts from 1, as in the paper (9 = index 8); 0: the role map's first layer
    "text_first_layer": ("TEXT_START_LAYER", 0),  # counts from 1; 0: the same share of the depth as in vision
    "text_tokens": ("TEXT_TOKENS", -1),  # -1: one per attribute
    "class_chunk": ("CLASS_CHUNK", 0),  # 0: all classes at once
}
_UNIFORM = {"all-" + role.value: role for role in (HeadRole.GENERALIZATION, HeadRole.MIXED)}


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.DEAR`: one key a field of DearConfig, the role map and the precision."""
    node = CfgNode()
    node.ROLES = "auto"  # the shipped map of the model, a shipped name, a path, all-generalization or all-mixed
    node.PREC = "amp"
    for field in fields(DearConfig):
        name, value = _SPECIAL.get(field.name, (field.name.upper(), field.default))
        node[name] = list(value) if isinstance(value, tuple) else value
    cfg.TRAINER.DEAR = node


def config_from_node(node: CfgNode) -> DearConfig:
    """`TRAINER.DEAR` as a DearConfig, which checks every value."""
    values = {}
    for field in fields(DearConfig):
        name, derived = _SPECIAL.get(field.name, (field.name.upper(), None))
        value = node[name]
        if field.name in _SPECIAL:
            value = None if value == derived else value
            if field.name.endswith("first_layer") and value is not None:
                if value < 1:
                    raise ValueError(f"TRAINER.DEAR.{name} is {value}; layers count from 1 there, 0 means derived")
                value -= 1
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return DearConfig(**values)


def described(name: str, role_map: RoleMap) -> str:
    """One line for the log: which map, how it was made, how many heads of which role, and its source if it has one."""
    infos = [info for row in role_map.infos for info in row]
    counts = Counter(str(i.attribute) if i.role is HeadRole.ATTRIBUTE else i.role.value for i in infos)
    shown = ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))
    source = role_map.parameters.get("source")
    return (f"Role map: {name} ({role_map.method}, {role_map.content_hash()[:12]}), heads of layers "
            f"{role_map.layers[0]}-{role_map.layers[-1]}: {shown}" + (f"; source: {source}" if source else ""))


@TRAINER_REGISTRY.register()
class DeAR(ClipTrainer):
    """One frozen CLIP gives adapted and frozen features in the same step; only the adapter is trained and saved."""

    precision_key = "TRAINER.DEAR.PREC"
    frozen_part = "trunk"
    compiles = True
    memory_key = "TRAINER.DEAR.CLASS_CHUNK, TRAINER.DEAR.RECOMPUTE True, or a smaller batch"

    def build_method(self) -> None:
        settings = config_from_node(self.cfg.TRAINER.DEAR)
        self.role_clip = wrap_clip_with_config(self.clip, self._roles(settings), settings).to(self.device)
        print(described(self.cfg.TRAINER.DEAR.ROLES, self.role_clip.role_map))
        self.adapter = self.role_clip.adapter
        self.optim = build_optimizer(self.adapter, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("dear_adapter", self.adapter, self.optim, self.sched)
        self._train_features = self.role_clip.image_features
        if own(self.cfg, "MODEL.COMPILE"):  # the first step then takes a minute
            self._train_features = torch.compile(self._train_features)
        self._prefix_of: tuple[tuple[str, ...], object] | None = None

    def _roles(self, settings: DearConfig) -> RoleMap | str:
        name = self.cfg.TRAINER.DEAR.ROLES
        if name not in _UNIFORM:
            return name
        tower = vision_tower(self.clip)
        first = settings.first_layer if settings.first_layer is not None else max(0, tower.layers - 4)
        return RoleMap.uniform(_UNIFORM[name], layers=range(first, tower.layers), heads=tower.heads)

    def _text_prefix(self):
        """Hidden states of the class prompts where tokens enter; nothing there is trained, so once per class list."""
        prompts = tuple(self.zero_shot_prompts())
        if self._prefix_of is None or self._prefix_of[0] != prompts:
            with torch.autocast(self.device.type, enabled=False):  # the same whoever asks first, a training or a test
                self._prefix_of = (prompts, self.role_clip.text_prefix(self.tokenize(list(prompts))))
        return self._prefix_of[1]

    def activation_parts(self) -> dict[str, int]:
        settings, prefix, towers = self.role_clip.config, self._text_prefix(), self.role_clip
        text, vision = towers.text_tower, towers.vision_tower
        text_layers, vision_layers = text.layers - settings.text_first_layer, vision.layers - settings.first_layer
        classes, length = prefix.hidden.shape[:2]
        chunk = min(classes, settings.class_chunk or classes)
        return {
            f"text of {chunk} classes": activation_bytes(
                text, sequences=chunk, length=length + settings.text_tokens, layers=text_layers),
            "images": activation_bytes(
                vision, sequences=self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE,
                length=vision.sequence_length + len(settings.attributes), layers=vision_layers),
        }

    def first_trained_layer(self) -> int:
        return self.role_clip.config.first_layer

    def reusable(self, images: Tensor) -> Tensor:
        return self.role_clip.trunk(images)

    def class_text_features(self) -> Tensor:
        return self.role_clip.text_features(self._text_prefix())

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        return self.role_clip.class_logits(self.role_clip.image_features(images), text)

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        settings, prefix = self.role_clip.config, self._text_prefix()
        with self.precision.autocast():
            image = self._train_features(images, frozen=settings.lambda_reg > 0)
            text = by_classes(
                lambda part: self.role_clip.text_features(prefix.of(part), chunk=settings.class_chunk), len(prefix.end))
            logits = self.role_clip.class_logits(image, text)
            terms = loss_terms(
                logits=logits, labels=labels, image=image, text=text, frozen_text=prefix.frozen,
                fusion=self.adapter.fusion, lambda_reg=settings.lambda_reg, lambda_fusion=settings.lambda_fusion)
        return self.finish_step(terms, logits, labels)

    def export_adapter(self, directory: Path) -> None:
        """`adapter/` for use without this harness: wrap_clip_with_adapter, scripts/predict.py."""
        save_adapter(self.role_clip, directory / "adapter", name=self.backbone.name)

    def run_facts(self) -> dict:
        """What result.json says beyond the shared fields."""
        with torch.no_grad():
            alpha = self.adapter.fusion.weights().tolist()
        return {
            "role_map_hash": self.role_clip.role_map.content_hash(), "role_map_method": self.role_clip.role_map.method,
            "fusion_weights": dict(zip(["cls", *self.role_clip.config.attributes], alpha, strict=True)),
        }
