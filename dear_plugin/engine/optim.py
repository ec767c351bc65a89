"""Optimizers by the contract's names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dear_plugin.engine.registry import check_name

OPTIMIZERS = ("adam", "amsgrad", "sgd", "rmsprop", "radam", "adamw")


def build_optimizer(model: nn.Module | Iterable, optim_cfg: Any, param_groups: Any = None) -> torch.optim.Optimizer:
    """An optimizer of the trainable parameters of `model` (a module, or what torch takes) by the OPTIM node.

    WEIGHT_DECAY applies to all, MOMENTUM to sgd and rmsprop, the betas to the Adam family; radam is torch's.
    """
    check_name(optim_cfg.NAME, OPTIMIZERS, what="optimizer", key="OPTIM.NAME")
    groups = param_groups if param_groups is not None else _parameters(model, optim_cfg)
    if param_groups is not None and optim_cfg.STAGED_LR:
        warnings.warn("OPTIM.STAGED_LR is ignored: the trainer gives its own parameter groups", stacklevel=2)
    shared = {"lr": optim_cfg.LR, "weight_decay": optim_cfg.WEIGHT_DECAY}
    betas = {"betas": (optim_cfg.ADAM_BETA1, optim_cfg.ADAM_BETA2)}
    if optim_cfg.NAME == "sgd":
        return torch.optim.SGD(
            groups,
            **shared,
            momentum=optim_cfg.MOMENTUM,
            dampening=optim_cfg.SGD_DAMPNING,
            nesterov=optim_cfg.SGD_NESTEROV,
        )
    if optim_cfg.NAME == "rmsprop":
        return torch.optim.RMSprop(groups, **shared, momentum=optim_cfg.MOMENTUM, alpha=optim_cfg.RMSPROP_ALPHA)
    if optim_cfg.NAME == "radam":
        return torch.optim.RAdam(groups, **shared, **betas)
    if optim_cfg.NAME == "adamw":
        return torch.optim.AdamW(groups, **shared, **betas)
    return torch.optim.Adam(groups, **shared, **betas, amsgrad=optim_cfg.NAME == "amsgrad")


def _parameters(model: nn.Module | Iterable, optim_cfg: Any) -> list:
    if not isinstance(model, nn.Module):
        if optim_cfg.STAGED_LR:
            raise ValueError(
                "OPTIM.STAGED_LR wants a module, whose children NEW_LAYERS names; got a list of parameters"
            )
        return list(model)
    if optim_cfg.STAGED_LR:
        return _staged(model, optim_cfg)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no trainable parameter (requires_grad); nothing to optimize")
    return parameters


def _staged(model: nn.Module, optim_cfg: Any) -> list[dict[str, Any]]:
    """Two groups, base first: the direct children named in NEW_LAYERS get LR, all others LR x BASE_LR_MULT."""
    new_layers = [optim_cfg.NEW_LAYERS] if isinstance(optim_cfg.NEW_LAYERS, str) else list(optim_cfg.NEW_LAYERS)
    children = dict(model.named_children())
    for name in new_layers:
        check_name(name, children, what="layer", key="OPTIM.NEW_LAYERS")
    new = [p for name in new_layers for p in children[name].parameters()]
    base = [p for name, child in children.items() if name not in new_layers for p in child.parameters()]
    return [{"params": base, "lr": optim_cfg.LR * optim_cfg.BASE_LR_MULT}, {"params": new}]
