"""What every method's run has beyond the contract: exact resume, a folder's identity, records, checks before and after.

Only hooks of the contract's TrainerX are overridden, so it works on the built-in engine and on a real Dassl alike.

A trainer file provides
    extend_cfg(cfg)              function of the module: adds the method's node, e.g. cfg.TRAINER.COOP
    trains = False               class attribute of a method that has nothing to train
    build_model()                sets self.model etc. and calls self.register_model(name, module, optim, sched)
    forward_backward(batch)      one step; calls self.check_finite({"ce": loss, ...}) before backward, and
                                 self.update_lr() on the last batch of the epoch; returns a dict of floats to show
    model_inference(images)      logits [N, C] of images [N, 3, R, R]
and may provide
    prompts()                    finished prompts, shown before training
    zero_shot_logits(images)     logits [N, C] of the untouched model: accuracy on a sample before and after training
    run_facts()                  further fields of result.json
    adapter_state(name) / load_adapter_state(name, state)   what a checkpoint of model `name` holds, if not state_dict()
    extra_state() / load_extra_state(state)   what exact resume needs besides models, optimizers and schedules
    export_adapter(directory)    files for use without this harness, written when training is done
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dear_plugin.engine import ENGINE, TrainerX, distributed, set_random_seed
from dear_plugin.engine.checkpoints import (
    BEST,
    file_sha256,
    find_checkpoint,
    load_checkpoint,
    load_strictly,
    save_checkpoint,
    without_module,
    write_atomically,
)
from dear_plugin.engine.config import own
from dear_plugin.engine.identity import (
    STATE_FILE,
    check_model_dir,
    claim_folder,
    config_digest,
    differences,
    now,
    read_run,
)
from dear_plugin.engine.preflight import (
    accuracy_on,
    check_labels,
    diagnosis,
    first_not_finite,
    notes_on_batches,
    notes_on_names,
    sample_loader,
)
from dear_plugin.engine.progress import WatchedLoader, progress
from dear_plugin.engine.records import Evaluation, Gatherer, write_records
from dear_plugin.engine.resume import generator_states, read_state, restore, save_state, set_generator_states
from dear_plugin.engine.schedules import plain_state

AUGMENT_SEEDS = ("worker", "image") if ENGINE == "builtin" else ("worker",)
FINAL_MODELS = ("last_step", "best_val")
EPOCH_SEEDS = 1_000_003  # apart from each other for all usual seeds and epochs


class MethodTrainer(TrainerX):
    """Base of our trainers; see the module's text for what a method provides."""

    trains = True

    def __init__(self, cfg: Any) -> None:
        self.started = now()
        self.step_seconds: list[float] = []
        self.seconds_before = 0.0  # of earlier sessions of a resumed run
        self.loaded: dict[str, dict[str, Any]] = {}
        self.evaluation: Evaluation | None = None
        self.zero_shot_sample: dict[str, Any] | None = None
        self._watched: WatchedLoader | None = None
        self._resumed: dict[str, Any] | None = None
        super().__init__(cfg)

    # -- hooks with defaults -------------------------------------------------------------------------------------------

    def prompts(self) -> list[str]:
        return []

    def run_facts(self) -> dict[str, Any]:
        return {}

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        return without_module(self._models[name].state_dict())

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        load_strictly(self._models[name], state, source=f"the checkpoint of {name}")

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what extra_state gave."""

    def export_adapter(self, directory: Path) -> None:
        """Called once after training, before result.json is written."""

    # -- building ------------------------------------------------------------------------------------------------------

    def check_cfg(self, cfg: Any) -> None:
        if cfg.TEST.FINAL_MODEL not in FINAL_MODELS:
            raise ValueError(f"TEST.FINAL_MODEL is {cfg.TEST.FINAL_MODEL!r}; allowed: {', '.join(FINAL_MODELS)}")
        if (setting := own(cfg, "DATALOADER.AUGMENT_SEED")) not in AUGMENT_SEEDS:
            raise ValueError(f"DATALOADER.AUGMENT_SEED is {setting!r}; allowed ({ENGINE}): {', '.join(AUGMENT_SEEDS)}")
        if self.trains and cfg.OPTIM.MAX_EPOCH < 1:
            raise ValueError(f"OPTIM.MAX_EPOCH is {cfg.OPTIM.MAX_EPOCH}: no step would be made; wanted 1 or more")

    def build_data_loader(self) -> None:
        super().build_data_loader()
        check_labels(self.dm.dataset)
        if self.trains and self.cfg.TEST.FINAL_MODEL == "best_val" and self.val_loader is None:
            raise ValueError(
                f"TEST.FINAL_MODEL is best_val, but {self.cfg.DATASET.NAME} has no val images: choosing on test is not "
                "done; set TEST.FINAL_MODEL last_step"
            )

    def register_model(
        self, name: str = "model", model: nn.Module | None = None, optim: Any = None, sched: Any = None
    ) -> None:
        """As in the contract; trainable parameters in half precision are refused (their updates round to nothing)."""
        for key, parameter in model.named_parameters() if model is not None else ():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"trainable parameter {name}.{key} is {parameter.dtype}; keep it in float32 and let autocast "
                    "compute in half precision"
                )
        super().register_model(name, model, optim, sched)

    def parse_batch_train(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Images [N, 3, R, R] and labels [N] on the device."""
        return tuple(batch[key].to(self.device, non_blocking=True) for key in ("img", "label"))

    # -- training ------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """The contract's life cycle, in a folder that is this run's; a finished one is left as it is."""
        if not self.trains:
            raise ValueError(f"{type(self).__name__} has nothing to train: use --eval-only")
        folder = claim_folder(self.cfg, "train")
        if folder.status == "finished":
            print(folder.sentence())
            return
        super().train()

    def before_train(self) -> None:
        if len(self.train_loader_x) == 0:
            raise ValueError(
                "an epoch has no steps: the sampler gives no full batch; lower DATALOADER.TRAIN_X.BATCH_SIZE"
            )
        super().before_train()
        distributed.check_same(self._models, "before training")
        before = generator_states()
        self._show_start()
        set_generator_states(before)

    def _show_start(self) -> None:
        """Prompts, warnings, and zero-shot accuracy on a sample of val (else train) images."""
        dataset = self.dm.dataset
        notes = notes_on_batches(len(dataset.train_x), self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE)
        if not hasattr(dataset, "facts"):  # data sets of our table have already said it
            notes += notes_on_names(dataset.classnames)
        print("\n".join([*(f"Prompt: {prompt}" for prompt in self.prompts()[:5]), *notes]) or "No prompts")
        if not hasattr(self, "zero_shot_logits"):
            return
        source, loader = self._sample()
        self.set_model_mode("eval")
        accuracy = accuracy_on(loader, self.zero_shot_logits, self.device)
        self.zero_shot_sample = {
            "images": len(loader.dataset),
            "source": source,
            "zero_shot_pct": accuracy,
            "final_pct": None,
        }
        print(f"Zero-shot accuracy on {len(loader.dataset)} {source} images: {accuracy:.1f}%")

    def _sample(self) -> tuple[str, Any]:
        """Images to look at before and after training, never of test; train images go through the test transform."""
        size = self.cfg.DATALOADER.TEST.BATCH_SIZE
        if self.val_loader is not None:
            return "val", sample_loader(self.val_loader.dataset, size)
        wrapper = type(self.test_loader.dataset)
        plain = wrapper(self.cfg, self.dm.dataset.train_x, transform=self.test_loader.dataset.transform, is_train=False)
        return "train", sample_loader(plain, size)

    def resume_model_if_exist(self, directory: str) -> int:
        """Continue only when RESUME is set; the folder's own state, which has every epoch, not the last checkpoint."""
        path = Path(directory) / STATE_FILE
        if not self.cfg.RESUME or (not path.is_file() and Path(directory) == Path(self.output_dir)):
            print("No checkpoint found, train from scratch")
            return 0
        if not path.is_file():
            raise FileNotFoundError(f"RESUME is {directory}, which has no {STATE_FILE}: nothing to continue there")
        state = read_state(path)
        if state["digest"] != config_digest(self.cfg):
            run = read_run(Path(directory))
            shown = differences(run, self.cfg, "train") if run else "other settings"
            raise ValueError(f"{directory} cannot be continued by this run: {shown}")
        print(f"Found checkpoint at {directory} (will resume training after epoch {state['epoch']})")
        restore(state, models=self._models, optims=self._optims, scheds=self._scheds, source=str(path))
        self.load_extra_state(state["extra"])
        self.best_result, self.seconds_before = state["best_result"], state["seconds"]
        self._resumed = state["generators"]
        if Path(directory) != Path(self.output_dir):  # the best epoch so far may lie there
            for name in self.get_model_names():
                best, target = Path(directory) / name / BEST, Path(self.output_dir) / name / BEST
                if best.is_file() and distributed.rank() == 0:
                    write_atomically(target, lambda path, best=best: shutil.copyfile(best, path))
        return state["epoch"]

    def before_epoch(self) -> None:
        """Seed from (SEED, epoch): an epoch does not depend on what was drawn before it.

        Without a SEED, a resumed run takes up the stored generators, and several processes those of the first.
        """
        super().before_epoch()
        if self.cfg.SEED >= 0:
            set_random_seed(self.cfg.SEED * EPOCH_SEEDS + self.epoch)
        elif self._resumed is not None:
            set_generator_states(self._resumed)
        elif distributed.world_size() > 1:
            set_generator_states(distributed.first_only(generator_states))
        self._resumed = None
        if own(self.cfg, "DATALOADER.AUGMENT_SEED") == "image":
            self.train_loader_x.dataset.image_seed = int(torch.randint(2**62, ()))

    def run_epoch(self) -> None:
        loader = self.train_loader_x
        self._watched = WatchedLoader(loader, f"epoch {self.epoch + 1}/{self.max_epoch}", self.step_seconds)
        self.train_loader_x = self._watched
        try:
            super().run_epoch()
        finally:
            self.train_loader_x = loader

    def check_finite(self, terms: Mapping[str, Tensor]) -> None:
        """FloatingPointError if a loss term is not finite: step, term, its likely source, the setting to change."""
        if (term := first_not_finite(terms)) is None:
            return
        batch = self._watched.batch if self._watched is not None else None
        step = self.epoch * self.num_batches + self.batch_idx + 1
        raise FloatingPointError(
            f"step {step} (epoch {self.epoch + 1}, batch {self.batch_idx + 1}): loss term {term!r} is not finite; "
            f"{diagnosis(self._models, batch, self.last_lr())}"
        )

    def detect_anomaly(self, loss: Tensor) -> None:
        self.check_finite({"loss": loss})

    def last_lr(self) -> float:
        return next((optim.param_groups[0]["lr"] for optim in self._optims.values() if optim is not None), 0.0)

    def after_epoch(self) -> None:
        for name, model in self._models.items():
            bad = first_not_finite({f"{name}.{key}": p for key, p in model.named_parameters() if p.requires_grad})
            if bad:
                raise FloatingPointError(
                    f"epoch {self.epoch + 1}: parameter {bad} is not finite; last lr {self.last_lr():g}: lower OPTIM.LR"
                )
        distributed.check_same(self._models, f"epoch {self.epoch + 1}")
        super().after_epoch()
        distributed.first_only(self._save_state)

    def _save_state(self) -> None:
        save_state(
            Path(self.output_dir) / STATE_FILE,
            epoch=self.epoch + 1,
            digest=config_digest(self.cfg),
            models=self._models,
            optims=self._optims,
            scheds=self._scheds,
            best_result=float(self.best_result),
            seconds=self.seconds(),
            extra=self.extra_state(),
        )

    def seconds(self) -> float:
        return self.seconds_before + time.time() - self.time_start

    def save_model(
        self,
        epoch: int,
        directory: str | Path,
        is_best: bool = False,
        val_result: float | None = None,
        model_name: str = "",
    ) -> None:
        distributed.first_only(lambda: self._save_model(epoch, directory, is_best, val_result, model_name))

    def _save_model(self, epoch: int, directory: Any, is_best: bool, val_result: float | None, model_name: str) -> None:
        for name in self.get_model_names():
            optim, sched = self._optims[name], self._scheds[name]
            state = {
                "state_dict": self.adapter_state(name),
                "epoch": epoch + 1,
                "optimizer": optim.state_dict() if optim is not None else None,
                "scheduler": plain_state(sched) if sched is not None else None,
                "val_result": val_result,
            }
            save_checkpoint(state, Path(directory) / name, is_best=is_best, model_name=model_name)

    def after_train(self) -> None:
        super().after_train()
        if self.zero_shot_sample is not None:
            self.set_model_mode("eval")
            final = accuracy_on(self._sample()[1], self.model_inference, self.device)
            self.zero_shot_sample["final_pct"] = final
            if final < self.zero_shot_sample["zero_shot_pct"]:
                print(
                    f"Warning: on the {self.zero_shot_sample['source']} sample the trained model has {final:.1f}%, "
                    f"below zero-shot ({self.zero_shot_sample['zero_shot_pct']:.1f}%)"
                )
        distributed.first_only(self._write_results)

    def _write_results(self) -> None:
        self.export_adapter(Path(self.output_dir))
        write_records(self, "train")
        (Path(self.output_dir) / STATE_FILE).unlink(missing_ok=True)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def load_model(self, directory: str | Path, epoch: int | None = None) -> None:
        """Load strictly and say what; a wrong folder, trainer, backbone or epoch is an error: it says what is there."""
        names = self.get_model_names()
        if not names:
            print(f"{type(self).__name__} has no trained part: nothing is loaded")
            return
        if not directory:
            raise ValueError(
                f"evaluating {type(self).__name__} needs a trained model: give its output folder as --model-dir, or "
                "choose --trainer ZeroshotCLIP"
            )
        if Path(directory) != Path(self.output_dir):
            check_model_dir(directory, self.cfg)
        for name in names:
            path = find_checkpoint(directory, name, epoch)
            checkpoint = load_checkpoint(path)
            state = checkpoint["state_dict"]
            try:
                self.load_adapter_state(name, state)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            self.loaded[name] = {
                "file": str(path),
                "epoch": checkpoint["epoch"],
                "sha256": file_sha256(path),
                "tensors": len(state),
            }
            print(f"Loaded {path} into {name}: epoch {checkpoint['epoch']}, {len(state)} tensors")

    @torch.no_grad()
    def test(self, split: str | None = None) -> float:
        """Evaluate a split, keep the predictions, return accuracy in percent. "val" without val images is an error."""
        self.set_model_mode("eval")
        self.evaluator.reset()
        split = split or self.cfg.TEST.SPLIT
        if split not in ("val", "test") or (split == "val" and self.val_loader is None):
            raise ValueError(
                f"split {split!r} cannot be evaluated: this data has {'val and ' if self.val_loader else ''}test; set "
                "TEST.SPLIT test"
            )
        print(f"Evaluate on the *{split}* set")
        gathered, loader = Gatherer(), self.val_loader if split == "val" else self.test_loader

        def answer(batch: dict[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
            images, labels = self.parse_batch_test(batch)
            return self.model_inference(images), labels, list(batch["impath"])

        for logits, labels, paths in distributed.in_turns(answer, progress(loader, f"evaluate {split}"), len(loader)):
            self.evaluator.process(logits, labels)
            gathered.add(logits, labels, paths)
        results = distributed.first_only(self.evaluator.evaluate)
        for name, value in results.items():
            self.write_scalar(f"{split}/{name}", value, self.epoch)
        self.evaluation = gathered.evaluation(split, results)
        return next(iter(results.values()))

    def evaluate(self, model_dir: str = "", epoch: int | None = None) -> float:
        """Load, test and record; trains nothing. A method with a trained part needs `model_dir`."""
        self.time_start = time.time()
        if claim_folder(self.cfg, "evaluation").status == "finished":
            print(f"Evaluating again: the earlier result in {self.output_dir} will be replaced")
        self.load_model(model_dir if self.trains else "", epoch=epoch)
        for line in self.prompts()[:5]:
            print(f"Prompt: {line}")
        accuracy = self.test()
        distributed.first_only(lambda: write_records(self, "evaluation"))
        return accuracy
