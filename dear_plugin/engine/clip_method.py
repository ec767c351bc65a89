"""What every CLIP method shares: backbone, prompts of the class list, precision, text features that are never stale."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dear_plugin.backbones import Backbone, load_backbone
from dear_plugin.engine import ENGINE, distributed
from dear_plugin.engine.config import own
from dear_plugin.engine.feature_cache import FeatureCache, Lookup, tower_digest
from dear_plugin.engine.method import MethodTrainer
from dear_plugin.engine.templates import template_for
from dear_plugin.engine.transforms import FIXED
from dear_plugin.version import __version__

PRECISIONS = ("fp32", "amp", "fp16")


class Precision:
    """How a step is computed. Trainable parameters are fp32 always; this decides the frozen part and the activations.

    fp32: everything in fp32. amp: fp32 weights under autocast (bf16 where the device has it, else fp16 with a scaled
    loss). fp16: the published setting of the older codes, half-precision CLIP weights; a CPU computes it as fp32, with
    one notice.
    """

    def __init__(self, name: str, device: torch.device, *, key: str) -> None:
        if name not in PRECISIONS:
            raise ValueError(f"{key} is {name!r}; allowed: {', '.join(PRECISIONS)}")
        if name == "fp16" and device.type == "cpu":
            print(f"{key} fp16 is computed in fp32 on a CPU")
            name = "fp32"
        self.name, self.device = name, device
        on_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if not on_cuda or torch.cuda.is_bf16_supported() else torch.float16
        scaled = name == "amp" and self.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(device.type) if scaled else None

    @property
    def backbone(self) -> str:
        """Precision in which the frozen weights are kept."""
        return "fp16" if self.name == "fp16" else "fp32"

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, self.dtype, enabled=self.name == "amp")

    def backward_and_step(self, loss: Tensor, optimizer: torch.optim.Optimizer, *, part: float = 1.0) -> None:
        """One optimiser step; under fp16 autocast one whose scaled gradients overflow is left out (GradScaler).

        `part` of the global batch is in `loss`; the gradients of all processes are summed.
        """
        optimizer.zero_grad(set_to_none=True)
        loss = loss if part == 1.0 else part * loss
        if self.scaler is None:
            loss.backward()
            distributed.sum_gradients(optimizer)
            optimizer.step()
            return
        self.scaler.scale(loss).backward()
        distributed.sum_gradients(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()


class ClipTrainer(MethodTrainer):
    """A method on a frozen CLIP: a subclass has build_method, class_text_features, logits, forward_backward."""

    precision_key = ""  # e.g. "TRAINER.COOP.PREC"
    takes_resnet = False  # whether encode_image is all it asks of the vision tower
    frozen_part = ""  # what the feature cache may keep: "image" features, the "trunk" below the tokens, or nothing
    compiles = False  # whether MODEL.COMPILE does anything
    memory_key = ""  # the setting that lowers the memory of a step, shown beside the estimate

    def build_model(self) -> None:
        self.precision = Precision(self.published_precision(), self.device, key=self.precision_key or "precision")
        name = self.cfg.MODEL.BACKBONE.NAME
        if not name:
            raise ValueError("MODEL.BACKBONE.NAME is empty; set it in the method's YAML or by --backbone")
        print(f"Loading CLIP (backbone: {name})")
        self.backbone: Backbone = load_backbone(
            name, device=self.device, precision=self.precision.backbone, resnet=self.takes_resnet)
        self._check_input_size()
        self.clip: nn.Module = self.backbone.model
        self._text_cache: tuple[Any, Tensor] | None = None
        self._zero_shot_text: Tensor | None = None
        self.build_method()
        if own(self.cfg, "MODEL.COMPILE") and not self.compiles:
            print(f"MODEL.COMPILE has no effect on {type(self).__name__}")
        self.cache = self._feature_cache()

    def published_precision(self) -> str:
        """The value of the method's own PREC key."""
        node: Any = self.cfg
        for part in self.precision_key.split(".") if self.precision_key else ():
            node = getattr(node, part)
        return node if self.precision_key else "fp32"

    def _check_input_size(self) -> None:
        wanted, size = self.backbone.input_resolution, tuple(self.cfg.INPUT.SIZE)
        if size != (wanted, wanted):
            raise ValueError(f"INPUT.SIZE is {size}, but {self.backbone.name} takes ({wanted}, {wanted}): "
                             "set INPUT.SIZE in the method's YAML")

    def _feature_cache(self) -> FeatureCache | None:
        """The cache that DATALOADER.FEATURE_CACHE asks for, known to the loaders whose transform is fixed."""
        folder = own(self.cfg, "DATALOADER.FEATURE_CACHE")
        if not folder:
            return None
        if not self.frozen_part or ENGINE != "builtin":
            why = "this is Dassl's loader" if self.frozen_part else f"{type(self).__name__} has no frozen first layers"
            print(f"DATALOADER.FEATURE_CACHE has no effect: {why}")
            return None
        made_by = (tower_digest(self.clip.visual), self.frozen_part, self.first_trained_layer(), self.precision.name,
                   self.precision.dtype, self.device.type, torch.__version__, __version__)
        cache = FeatureCache(folder, limit_gib=own(self.cfg, "DATALOADER.FEATURE_CACHE_GIB"), made_by=made_by)
        random = sorted(set(self.cfg.INPUT.TRANSFORMS) - set(FIXED))
        one_view = self.cfg.DATALOADER.K_TRANSFORMS == 1 and not self.cfg.DATALOADER.RETURN_IMG0
        if random or not one_view:
            print(f"The feature cache leaves the training images out: {', '.join(random) or 'several views of each'}")
        for loader in (self.test_loader, self.val_loader, None if random or not one_view else self.train_loader_x):
            if loader is not None:
                loader.dataset.features = Lookup(cache, loader.dataset.transform)
        return cache

    def first_trained_layer(self) -> int:
        """The vision layer where what is trained enters; the trunk ends before it."""
        return 0

    def reusable(self, images: Tensor) -> Tensor:
        """What the feature cache keeps of images [N, 3, R, R]: [N, E], or [N, 1 + P, D] of a trunk.

        A method that names a frozen_part takes it in place of the images: frozen_image, trunk.
        """
        return self.frozen_image(images)

    def parse_batch_train(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Images [N, 3, R, R], or what the feature cache holds of them, and labels [N], on the device."""
        if "hit" not in batch:
            return super().parse_batch_train(batch)
        return self._recall(batch), batch["label"].to(self.device, non_blocking=True)

    def parse_batch_test(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if "hit" not in batch:
            return super().parse_batch_test(batch)
        return self._recall(batch), batch["label"].to(self.device, non_blocking=True)

    @torch.no_grad()
    def _recall(self, batch: dict[str, Any]) -> Tensor:
        """Features of a batch in order: those that were known, and the others computed now and kept."""
        cache, hit, keys = self.cache, batch["hit"], batch["keys"]
        rows: list[Tensor] = []
        cache.touch([key for key, known in zip(keys, hit.tolist(), strict=True) if known])
        if len(batch["features"]):
            rows.append(batch["features"].to(self.device, non_blocking=True))
        if len(batch["img"]):
            with self.precision.autocast():
                rows.append(self.reusable(batch["img"].to(self.device, non_blocking=True)))
            cache.put([key for key, known in zip(keys, hit.tolist(), strict=True) if not known], rows[-1])
        cache.hits, cache.misses = cache.hits + int(hit.sum()), cache.misses + int((~hit).sum())
        place = torch.cat([hit.nonzero()[:, 0], (~hit).nonzero()[:, 0]]).argsort().to(self.device)
        return torch.cat(rows)[place]

    def test(self, split: str | None = None) -> float:
        accuracy = super().test(split)
        if self.cache is not None:
            print(self.cache.sentence())
        return accuracy

    @property
    def classnames(self) -> list[str]:
        """Names of the current classes in label order, underscores as spaces."""
        return [name.replace("_", " ") for name in self.dm.dataset.classnames]

    def zero_shot_prompts(self) -> list[str]:
        """One finished sentence a class: the data set's template filled in."""
        template = template_for(self.cfg)
        return [template.format(name) for name in self.classnames]

    def prompts(self) -> list[str]:
        """The sentences this method starts from, as shown before training."""
        return self.zero_shot_prompts()

    def tokenize(self, texts: list[str]) -> Tensor:
        """Token ids [C, 77] on the trainer's device."""
        return self.backbone.tokenize(texts).to(self.device)

    @torch.no_grad()
    def frozen_image(self, images: Tensor) -> Tensor:
        """Features [N, E] of the untouched CLIP, whose weights may be in half precision; no graph is kept.

        Where `images` are features already (from the cache), they are given back.
        """
        if images.dim() == 2:
            return images
        return self.clip.encode_image(images.to(self.clip.visual.conv1.weight.dtype))

    @torch.no_grad()
    def zero_shot_logits(self, images: Tensor) -> Tensor:
        """Logits [N, C] of the untouched CLIP with the data set's template."""
        if self._zero_shot_text is None:
            rows = [self.clip.encode_text(part) for part in self.tokenize(self.zero_shot_prompts()).split(256)]
            self._zero_shot_text = nn.functional.normalize(torch.cat(rows).float(), dim=-1)
        image = nn.functional.normalize(self.frozen_image(images).float(), dim=-1)
        return self.clip.logit_scale.exp().float() * image @ self._zero_shot_text.T

    def model_inference(self, images: Tensor) -> Tensor:
        """Logits [N, C]. The text side runs once per class list and parameter state, not once per batch."""
        version = self.text_version()
        if self._text_cache is None or self._text_cache[0] != version:
            with torch.no_grad(), self.precision.autocast():
                self._text_cache = (version, self.class_text_features().float())
        with self.precision.autocast():
            return self.logits(images, self._text_cache[1]).float()

    def extra_state(self) -> dict:
        """The loss scale, which exact resume needs under fp16 autocast."""
        return {} if self.precision.scaler is None else {"scaler": self.precision.scaler.state_dict()}

    def load_extra_state(self, state: dict) -> None:
        if self.precision.scaler is not None and "scaler" in state:
            self.precision.scaler.load_state_dict(state["scaler"])

    def before_train(self) -> None:
        parts = self.activation_parts()
        if parts:
            shown = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())
            print(f"Memory estimate for the activations of a step: {shown}"
                  + (f" (lower it by {self.memory_key})" if self.memory_key else ""))
        super().before_train()

    def activation_parts(self) -> dict[str, int]:
        """Rough bytes that autograd keeps in a step, by part, e.g. {"text": ...}; see `activation_bytes`."""
        return {}

    def text_version(self) -> tuple:
        """Changes whenever a trained parameter is written (torch counts writes) or replaced, or the classes change."""
        parameters = [p for model in self._models.values() for p in model.parameters()]
        return (tuple((id(p), p._version) for p in parameters), tuple(self.classnames))

    def finish_step(self, terms: Mapping[str, Tensor], logits: Tensor, labels: Tensor) -> dict[str, float]:
        """The second half of forward_backward: a step on terms["total"], the schedule after an epoch's last batch.

        Returns what the training line shows: the loss, its named terms where there are several, the batch's accuracy.
        """
        self.check_finite(terms)
        part = distributed.batch_share(len(labels))
        self.precision.backward_and_step(terms["total"], self.optim, part=part)
        if self.batch_idx + 1 == self.num_batches:
            self.update_lr()
        parts = {name: value.item() for name, value in terms.items() if name != "total"}
        accuracy = 100.0 * (logits.argmax(1) == labels).float().mean().item()
        return distributed.averaged({"loss": terms["total"].item(), **parts, "acc": accuracy}, part)

    def build_method(self) -> None:
        """Build what is trained on `self.clip` and register it with its optimiser and scheduler."""
        raise TypeError(f"{type(self).__name__} must define build_method")

    def class_text_features(self) -> Tensor:
        """Text features [C, E] of the current classes, not normalised."""
        raise TypeError(f"{type(self).__name__} must define class_text_features")

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        """Logits [N, C] of images [N, 3, R, R] against text features [C, E]."""
        raise TypeError(f"{type(self).__name__} must define logits")


def activation_bytes(tower: Any, *, sequences: int, length: int, layers: int) -> int:
    """Rough bytes that autograd keeps of `layers` blocks over [sequences, length, D] in fp32.

    A pre-norm block keeps about 14 tensors of that size, most of them around the MLP's four-fold hidden layer; a test
    holds this against what autograd saves.
    """
    return 14 * 4 * sequences * length * tower.width * layers


def cosine_logits(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """scale * cos(image [N, E], text [C, E]) -> [N, C]; fp32 even under autocast, where bf16 is too coarse."""
    with torch.autocast(image.device.type, enabled=False):
        image, text = nn.functional.normalize(image.float(), dim=-1), nn.functional.normalize(text.float(), dim=-1)
        return scale.float() * image @ text.T
