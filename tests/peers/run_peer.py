"""Runs one published trainer, unchanged, from its own checkout: python run_peer.py CHECKOUT INPUT OUTPUT.

A program of its own, because the checkouts have packages called clip, trainers and datasets. What the published code
takes for granted (a CUDA device, half precision, an installed Dassl, a download) is stood in for from here.
"""

from __future__ import annotations

import importlib
import resource
import sys
import time
import types

import shims
import torch
from yacs.config import CfgNode

MODULES = {"CoOp": "coop", "CoCoOp": "cocoop", "MaPLe": "maple", "PromptSRC": "promptsrc", "MMRL": "mmrl"}


class Registry:
    def register(self):
        return lambda made: made


class Base:
    """The part of a Dassl trainer that forward_backward and build_model use."""

    def register_model(self, name, model, optim, sched) -> None:
        self.registered = name, model

    def update_lr(self) -> None:
        """The rate stays."""

    def model_backward_and_update(self, loss) -> None:
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()


def optimizer(model, cfg):
    trained = [p for p in model.parameters() if p.requires_grad]
    if cfg.NAME == "sgd":
        return torch.optim.SGD(trained, lr=cfg.LR, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(trained, lr=cfg.LR, weight_decay=5e-4)


def module(name: str, **members) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made


def stand_ins(clip_file: str) -> None:
    """Dassl, a GPU, half precision and a download."""
    module("dassl")
    module("dassl.engine", TRAINER_REGISTRY=Registry(), TrainerX=Base)
    module("dassl.metrics", compute_accuracy=lambda *_: [torch.zeros(1)])
    module("dassl.utils", load_pretrained_weights=None, load_checkpoint=None)
    module("dassl.optim", build_optimizer=optimizer, build_lr_scheduler=lambda *_: None)
    shims.cpu_in_float32()
    shims.weights_from(clip_file)


def main(checkout: str, input_file: str, output_file: str) -> None:
    given = torch.load(input_file, weights_only=True)
    sys.path.insert(0, checkout)
    stand_ins(given["clip"])
    trainers = importlib.import_module(f"trainers.{MODULES[given['method']]}")
    cfg = CfgNode({
        "MODEL": {"BACKBONE": {"NAME": "ViT-B/16"}, "INIT_WEIGHTS": ""},
        "INPUT": {"SIZE": [given["images"].shape[-1]] * 2},
        "DATASET": {"NAME": given["dataset"]}, "OPTIM": {**given["optim"], "MAX_EPOCH": given["steps"]},
        "TRAINER": {given["node"]: {**given["settings"], "PREC": "fp32"}},
    })
    trainer = getattr(trainers, given["method"])()
    trainer.cfg, trainer.device = cfg, torch.device("cpu")
    trainer.dm = types.SimpleNamespace(dataset=types.SimpleNamespace(classnames=given["classnames"]))
    trainer.build_model()
    name, model = trainer.registered
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    theirs, ours = ({key: value.shape for key, value in tensors.items()} for tensors in (trained, given["start"]))
    if theirs != ours:
        raise SystemExit(f"trained tensors differ: theirs {theirs}, ours {ours}")
    with torch.no_grad():
        for key, value in trained.items():
            value.copy_(given["start"][key])
    result = {"name": name, "seconds": []}
    if not given.get("timing"):
        trainer.model.eval()
        with torch.no_grad():
            logits = trainer.model(given["images"])
        result["logits"] = logits[2] if isinstance(logits, tuple) else logits
    trainer.model.train()
    trainer.batch_idx, trainer.num_batches = 0, 9 if given.get("timing") else 1
    for step in range(given["steps"]):
        started = time.perf_counter()
        shown = trainer.forward_backward({"img": given["images"], "label": given["labels"]})
        result["seconds"].append(time.perf_counter() - started)
        if step == 0:
            result["loss"] = torch.tensor(shown["loss"])
            result["grads"] = {key: value.grad.clone() for key, value in trained.items()}
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["parameters"] = {key: value.detach() for key, value in trained.items()}
    if given["with_state"]:
        result["state_dict"] = model.state_dict()
    torch.save(result, output_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
