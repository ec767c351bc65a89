"""The contract's life cycle: build, train by epochs, save, test (dassl_contract.md, section 5)."""

from __future__ import annotations

import datetime
import math
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dear_plugin.engine.checkpoints import find_checkpoint, load_checkpoint, load_strictly, save_checkpoint
from dear_plugin.engine.data import DataManager
from dear_plugin.engine.meters import AverageMeter, MetricMeter
from dear_plugin.engine.progress import progress
from dear_plugin.engine.registry import build_evaluator, check_name


class TrainerBase:
    """Named models with their optimizers and schedulers, and what is done to all of them."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, nn.Module] = OrderedDict()
        self._optims: OrderedDict[str, Any] = OrderedDict()
        self._scheds: OrderedDict[str, Any] = OrderedDict()
        self._writer: Any = None

    def register_model(
        self, name: str = "model", model: nn.Module | None = None, optim: Any = None, sched: Any = None
    ) -> None:
        """`name` is also the folder of the model's checkpoints."""
        if name in self._models:
            raise ValueError(f"a model named {name!r} is registered already; give the second one another name")
        self._models[name], self._optims[name], self._scheds[name] = model, optim, sched

    def get_model_names(self, names: str | list[str] | None = None) -> list[str]:
        if names is None:
            return list(self._models)
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            check_name(name, self._models, what="model", key="the name")
        return names

    def set_model_mode(self, mode: str = "train", names: str | list[str] | None = None) -> None:
        if mode not in ("train", "test", "eval"):
            raise ValueError(f"mode is {mode!r}; wanted train, test or eval")
        for name in self.get_model_names(names):
            self._models[name].train(mode == "train")

    def update_lr(self, names: str | list[str] | None = None) -> None:
        """One epoch further on every schedule; the trainer calls it on the last batch of an epoch."""
        for name in self.get_model_names(names):
            if self._scheds[name] is not None:
                self._scheds[name].step()

    def get_current_lr(self, names: str | list[str] | None = None) -> float:
        optimizers = [self._optims[name] for name in self.get_model_names(names) if self._optims[name] is not None]
        return optimizers[0].param_groups[0]["lr"] if optimizers else 0.0

    def detect_anomaly(self, loss: Tensor) -> None:
        if not torch.isfinite(loss).all():
            raise FloatingPointError("the loss is infinite or not a number")

    def model_zero_grad(self, names: str | list[str] | None = None) -> None:
        for name in self.get_model_names(names):
            if self._optims[name] is not None:
                self._optims[name].zero_grad()

    def model_backward(self, loss: Tensor) -> None:
        self.detect_anomaly(loss)
        loss.backward()

    def model_update(self, names: str | list[str] | None = None) -> None:
        for name in self.get_model_names(names):
            if self._optims[name] is not None:
                self._optims[name].step()

    def model_backward_and_update(self, loss: Tensor, names: str | list[str] | None = None) -> None:
        self.model_zero_grad(names)
        self.model_backward(loss)
        self.model_update(names)

    def save_model(
        self,
        epoch: int,
        directory: str | Path,
        is_best: bool = False,
        val_result: float | None = None,
        model_name: str = "",
    ) -> None:
        """Write each model's checkpoint after `epoch` (counted from 0) into `<directory>/<model name>/`."""
        for name in self.get_model_names():
            optim, sched = self._optims[name], self._scheds[name]
            state = {
                "state_dict": self._models[name].state_dict(),
                "epoch": epoch + 1,
                "optimizer": optim.state_dict() if optim is not None else None,
                "scheduler": sched.state_dict() if sched is not None else None,
                "val_result": val_result,
            }
            save_checkpoint(state, Path(directory) / name, is_best=is_best, model_name=model_name)

    def load_model(self, directory: str | Path, epoch: int | None = None) -> None:
        """Load strictly: model-best, or the checkpoint of an epoch."""
        if not directory:
            print("No model folder is given: nothing is loaded")
            return
        for name in self.get_model_names():
            path = find_checkpoint(directory, name, epoch)
            checkpoint = load_checkpoint(path)
            load_strictly(self._models[name], checkpoint["state_dict"], source=str(path))
            print(f"Load {path} to {name} (epoch={checkpoint['epoch']}, val_result={checkpoint['val_result']})")

    def resume_model_if_exist(self, directory: str | Path) -> int:
        """Go on from the file that `checkpoint` names, if every model has its folder; returns the first epoch."""
        folders = {name: Path(directory) / name for name in self.get_model_names()}
        if not folders or not all((folder / "checkpoint").is_file() for folder in folders.values()):
            print("No checkpoint found, train from scratch")
            return 0
        print(f"Found checkpoint at {directory} (will resume training)")
        epoch = 0
        for name, folder in folders.items():
            state = load_checkpoint(folder / (folder / "checkpoint").read_text(encoding="utf-8").strip())
            load_strictly(self._models[name], state["state_dict"], source=str(folder))
            for target, key in ((self._optims[name], "optimizer"), (self._scheds[name], "scheduler")):
                if target is not None and state[key] is not None:
                    target.load_state_dict(state[key])
            epoch = state["epoch"]
        return epoch

    def init_writer(self, log_dir: str | Path) -> None:
        """A TensorBoard writer, where TensorBoard is installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        if self._writer is None:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(log_dir=str(log_dir))

    def close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def write_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        if self._writer is not None:
            self._writer.add_scalar(tag, scalar_value, global_step)


class TrainerX(TrainerBase):
    """Training on labelled images. A method defines `build_model`, `forward_backward` and perhaps `model_inference`."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.check_cfg(cfg)
        self.cfg = cfg
        self.device = torch.device("cuda" if torch.cuda.is_available() and cfg.USE_CUDA else "cpu")
        self.start_epoch = self.epoch = 0
        self.max_epoch = cfg.OPTIM.MAX_EPOCH
        self.output_dir = cfg.OUTPUT_DIR
        self.build_data_loader()
        self.build_model()
        self.evaluator = build_evaluator(cfg, lab2cname=self.lab2cname)
        self.best_result = -math.inf

    def check_cfg(self, cfg: Any) -> None:
        """A method may refuse a config here, before data are read."""

    def build_data_loader(self) -> None:
        self.dm = DataManager(self.cfg)
        self.train_loader_x, self.train_loader_u = self.dm.train_loader_x, self.dm.train_loader_u
        self.val_loader, self.test_loader = self.dm.val_loader, self.dm.test_loader
        self.num_classes, self.lab2cname = self.dm.num_classes, self.dm.lab2cname
        self.num_source_domains = self.dm.num_source_domains

    def build_model(self) -> None:
        raise TypeError(f"{type(self).__name__} must define build_model")

    def forward_backward(self, batch: dict[str, Any]) -> dict[str, float]:
        raise TypeError(f"{type(self).__name__} must define forward_backward")

    def model_inference(self, input: Tensor) -> Tensor:
        """Logits [N, C] of images [N, 3, R, R]."""
        return self.model(input)

    def parse_batch_train(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(batch[key].to(self.device, non_blocking=True) for key in ("img", "label", "domain"))

    def parse_batch_test(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return tuple(batch[key].to(self.device, non_blocking=True) for key in ("img", "label"))

    def train(self) -> None:
        self.before_train()
        for epoch in range(self.start_epoch, self.max_epoch):
            self.epoch = epoch
            self.before_epoch()
            self.run_epoch()
            self.after_epoch()
        self.after_train()

    def before_train(self) -> None:
        self.start_epoch = self.resume_model_if_exist(self.cfg.RESUME or self.cfg.OUTPUT_DIR)
        self.init_writer(Path(self.output_dir) / "tensorboard")
        self.time_start = time.time()

    def before_epoch(self) -> None:
        """Called before each epoch."""

    def run_epoch(self) -> None:
        self.set_model_mode("train")
        losses, batch_time, data_time = MetricMeter(), AverageMeter(), AverageMeter()
        self.num_batches = len(self.train_loader_x)
        end = time.time()
        for index, batch in enumerate(self.train_loader_x):
            self.batch_idx = index
            data_time.update(time.time() - end)
            losses.update(self.forward_backward(batch))
            batch_time.update(time.time() - end)
            every = self.cfg.TRAIN.PRINT_FREQ
            if (self.batch_idx + 1) % every == 0 or self.num_batches < every:
                print(self._training_line(losses, batch_time, data_time))
            step = self.epoch * self.num_batches + self.batch_idx
            for name, meter in losses.meters.items():
                self.write_scalar(f"train/{name}", meter.avg, step)
            self.write_scalar("train/lr", self.get_current_lr(), step)
            end = time.time()

    def _training_line(self, losses: MetricMeter, batch_time: AverageMeter, data_time: AverageMeter) -> str:
        left = (self.max_epoch - self.epoch) * self.num_batches - self.batch_idx - 1
        eta = datetime.timedelta(seconds=int(batch_time.avg * left))
        return (
            f"epoch [{self.epoch + 1}/{self.max_epoch}] batch [{self.batch_idx + 1}/{self.num_batches}] "
            f"time {batch_time.val:.3f} ({batch_time.avg:.3f}) data {data_time.val:.3f} ({data_time.avg:.3f}) "
            f"{losses} lr {self.get_current_lr():.4e} eta {eta}"
        )

    def after_epoch(self) -> None:
        """Validate if the best epoch is wanted, then save where the settings ask for it."""
        finished, every = self.epoch + 1, self.cfg.TRAIN.CHECKPOINT_FREQ
        if not self.cfg.TEST.NO_TEST and self.cfg.TEST.FINAL_MODEL == "best_val":
            result = self.test(split="val")
            if result > self.best_result:
                self.best_result = result
                self.save_model(self.epoch, self.output_dir, val_result=result, model_name="model-best.pth.tar")
        if finished == self.max_epoch or (every > 0 and finished % every == 0):
            self.save_model(self.epoch, self.output_dir)

    def after_train(self) -> None:
        print("Finish training")
        if not self.cfg.TEST.NO_TEST:
            if self.cfg.TEST.FINAL_MODEL == "best_val":
                print("Deploy the model with the best val performance")
                self.load_model(self.output_dir)
            else:
                print("Deploy the last-epoch model")
            self.test()
        print(f"Elapsed: {datetime.timedelta(seconds=round(time.time() - self.time_start))}")
        self.close_writer()

    @torch.no_grad()
    def test(self, split: str | None = None) -> float:
        """Evaluate a split and return the first metric, accuracy in percent. "val" without a val list means test."""
        self.set_model_mode("eval")
        self.evaluator.reset()
        split = split or self.cfg.TEST.SPLIT
        if split != "val" or self.val_loader is None:
            split = "test"
        print(f"Evaluate on the *{split}* set")
        for batch in progress(self.val_loader if split == "val" else self.test_loader, f"evaluate {split}"):
            images, labels = self.parse_batch_test(batch)
            self.evaluator.process(self.model_inference(images), labels)
        results = self.evaluator.evaluate()
        for name, value in results.items():
            self.write_scalar(f"{split}/{name}", value, self.epoch)
        return next(iter(results.values()))
