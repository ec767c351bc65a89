"""Train or evaluate one method on one data set, with the command line of CoOp's train.py.

Precedence, weakest first: defaults, data-set YAML, method YAML, its PER_DATASET values, named flags, KEY VALUE pairs.
Unlike CoOp's, a flag counts whenever it is given, so `--seed 0` seeds with 0, and a SEED in YAML is used when there is
no --seed.
Exit codes: 0 done (or done before), 2 bad input (one sentence on standard error), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] != str(ROOT):  # first, because Hugging Face's package is called datasets too
    sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from dear_plugin.engine.config import ConfigNode

# How a method's file names its class; read as text, so that --help imports nothing. A new method is a file there.
_REGISTERED = re.compile(r"^@TRAINER_REGISTRY\.register\(\)\nclass (\w+)\(", re.MULTILINE)
HERE = "."  # what `--resume` without a folder means: the output folder
FLAG_KEYS = {
    "root": "DATASET.ROOT",
    "output_dir": "OUTPUT_DIR",
    "resume": "RESUME",
    "seed": "SEED",
    "trainer": "TRAINER.NAME",
    "source_domains": "DATASET.SOURCE_DOMAINS",
    "target_domains": "DATASET.TARGET_DOMAINS",
    "transforms": "INPUT.TRANSFORMS",
    "backbone": "MODEL.BACKBONE.NAME",
    "head": "MODEL.HEAD.NAME",
}
_CONFIG_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Za-z0-9_]+)*$")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train or evaluate a CLIP adaptation method.")
    add = parser.add_argument
    add("--root", default="", help="folder of the data sets ($DATA)")
    add("--output-dir", default="", help="folder of this run's results")
    add(
        "--resume",
        nargs="?",
        const=HERE,
        default="",
        help="continue an interrupted run; without a value: the one in --output-dir",
    )
    add("--seed", type=int, default=None, help="0 is a seed; negative: no seeding; left out: SEED of the YAML files")
    add("--source-domains", nargs="+", help="shown in the summary")
    add("--target-domains", nargs="+", help="shown in the summary")
    add("--transforms", nargs="+", help="INPUT.TRANSFORMS, e.g. random_resized_crop random_flip normalize")
    add("--config-file", default="", help="YAML file of the method")
    add("--dataset-config-file", default="", help="YAML file of the data set")
    add("--trainer", default="", help=f"one of {', '.join(available_modules())}")
    add("--backbone", default="", help="name of the CLIP model, e.g. ViT-B/16 or tiny")
    add("--head", default="", help="MODEL.HEAD.NAME; no CLIP method reads it")
    add("--eval-only", action="store_true", help="load --model-dir and test")
    add("--model-dir", default="", help="output folder of the training to evaluate")
    add("--load-epoch", type=int, default=None, help="which checkpoint to evaluate; left out: the best or last one")
    add("--no-train", action="store_true", help="build data and model, then stop; writes nothing")
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config overrides; after all flags")
    parsed = parser.parse_args(arguments)
    if parsed.resume and len(parsed.opts) % 2 and _CONFIG_KEY.match(parsed.resume):  # `--resume KEY VALUE`
        parsed.opts, parsed.resume = [parsed.resume, *parsed.opts], HERE
    return parsed


def available_modules() -> dict[str, str]:
    """Registry name -> module in trainers/, of every file there that registers a trainer."""
    return {
        name: path.stem
        for path in sorted((ROOT / "trainers").glob("*.py"))
        for name in _REGISTERED.findall(path.read_text(encoding="utf-8"))
    }


def import_trainers() -> list[Any]:
    """Import every method's module; importing registers its class."""
    return [importlib.import_module(f"trainers.{module}") for module in sorted(set(available_modules().values()))]


def find_file(name: str) -> Path:
    """A config file relative to the working directory, else to the checkout."""
    path = Path(name).expanduser()
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


def build_config(args: argparse.Namespace) -> ConfigNode:
    """The frozen config of a call."""
    from datasets import table
    from dear_plugin.engine import get_cfg_default
    from dear_plugin.engine.config import add_own_keys
    from dear_plugin.engine.distributed import asked_for

    cfg = get_cfg_default()
    table.extend_cfg(cfg)
    for module in import_trainers():
        getattr(module, "extend_cfg", lambda _: None)(cfg)
    add_own_keys(cfg)
    cfg.PROTOCOL = ""  # recorded in result.json, so that the report never mixes protocols; changes no number
    cfg.PER_DATASET = type(cfg)(new_allowed=True)
    for file in (args.dataset_config_file, args.config_file):
        if file:
            cfg.merge_from_file(find_file(file))
    take_values_of_data_set(cfg)
    for flag, key in FLAG_KEYS.items():
        value = getattr(args, flag)
        if value is not None and value != "":
            set_key(cfg, key, tuple(value) if isinstance(value, list) else value)
    cfg.merge_from_list(args.opts)
    if asked_for() > 1:  # what a worker draws would depend on the number of processes
        cfg.DATALOADER.AUGMENT_SEED = "image"
    if cfg.RESUME == HERE:
        cfg.RESUME = cfg.OUTPUT_DIR
    cfg.freeze()
    return cfg


def take_values_of_data_set(cfg: Any) -> None:
    """PER_DATASET of a method's YAML, {data set: {settings}}: those of this data set are merged, the group goes."""
    values = cfg.pop("PER_DATASET")
    if cfg.DATASET.NAME in values:
        cfg.merge_from_other_cfg(values[cfg.DATASET.NAME])


def set_key(cfg: Any, key: str, value: Any) -> None:
    """Set "A.B.C" as it is: names like 7 or 1e5 stay text."""
    *parents, leaf = key.split(".")
    for name in parents:
        cfg = cfg[name]
    cfg[leaf] = value


def check_names(cfg: Any) -> type:
    """The trainer's class; an unknown trainer or data set is refused with the nearest name before anything is made."""
    from datasets import table
    from dear_plugin.engine import DATASET_REGISTRY, TRAINER_REGISTRY
    from dear_plugin.engine.registry import check_name

    table.register_all()
    check_name(cfg.TRAINER.NAME, available_modules(), what="trainer", key="--trainer")
    known = DATASET_REGISTRY.registered_names()
    own = "" if cfg.DATASET.NAME in known else ". For images of your own use the data set Folder with --root"
    try:
        check_name(cfg.DATASET.NAME, known, what="data set", key="DATASET.NAME (--dataset-config-file)")
    except ValueError as error:
        raise ValueError(f"{error}{own}") from error
    return TRAINER_REGISTRY.get(cfg.TRAINER.NAME)


def run(args: argparse.Namespace) -> None:
    """Everything after the command line was read; under torchrun in each of its processes."""
    from dear_plugin.engine import ENGINE, distributed

    cfg = build_config(args)
    if distributed.asked_for() > 1 and ENGINE != "builtin":
        raise ValueError(f"torchrun wants the built-in engine, this is {ENGINE}: set DEAR_ENGINE=builtin")
    with distributed.processes(use_cuda=cfg.USE_CUDA), contextlib.ExitStack() as silent:
        if distributed.rank() > 0:
            silent.enter_context(contextlib.redirect_stdout(silent.enter_context(open(os.devnull, "w"))))
        run_here(args, cfg)


def run_here(args: argparse.Namespace, cfg: ConfigNode) -> None:
    import torch

    from dear_plugin.engine import build_trainer, collect_env_info, distributed, engine_line, setup_logger
    from dear_plugin.engine.identity import check_model_dir, claim_folder, same_weights

    trainer_class = check_names(cfg)
    trains = getattr(trainer_class, "trains", True)
    evaluates = args.eval_only or not trains
    if evaluates and not args.eval_only:
        print(f"{cfg.TRAINER.NAME} has nothing to train: evaluating")
    if evaluates and trains:
        if not args.model_dir:
            raise ValueError(
                f"evaluating {cfg.TRAINER.NAME} needs a trained model: give its output folder as --model-dir, or "
                "choose --trainer ZeroshotCLIP"
            )
        check_model_dir(args.model_dir, cfg)
    if not args.no_train:
        folder = claim_folder(cfg, "evaluation" if evaluates else "train")
        if folder.status == "finished":
            if not evaluates or same_weights(folder.result, args.model_dir if trains else "", args.load_epoch):
                print(folder.sentence())
                return
            print(f"{args.model_dir} holds other weights than those evaluated in {folder.path}: evaluating again")
    set_seed(cfg.SEED)
    if not args.no_train and distributed.rank() == 0:
        setup_logger(cfg.OUTPUT_DIR, append=folder.status == "interrupted")
    print(engine_line())
    if distributed.world_size() > 1:
        print(f"{distributed.world_size()} processes share each batch; the first one writes")
    if torch.cuda.is_available() and cfg.USE_CUDA:
        torch.backends.cudnn.benchmark = True
    show_call(args, cfg)
    print(f"** Environment **\n{collect_env_info()}\n")
    trainer = build_trainer(cfg)
    if args.no_train:
        print("Built, not trained (--no-train); nothing is written")
    elif evaluates:
        trainer.evaluate(args.model_dir, epoch=args.load_epoch)
    else:
        trainer.train()


def set_seed(seed: int) -> None:
    """Seed all generators; with a negative seed they stay random, in several processes alike."""
    import torch

    from dear_plugin.engine import distributed, set_random_seed

    if seed >= 0:
        print(f"Setting fixed seed: {seed}")
        set_random_seed(seed)
    elif distributed.world_size() > 1:
        set_random_seed(distributed.first_only(torch.seed) % 2**32)


def show_call(args: argparse.Namespace, cfg: Any) -> None:
    """The flags by name and the whole config."""
    rule = "*" * 12
    flags = "\n".join(f"{name}: {value}" for name, value in sorted(vars(args).items()))
    print(f"{rule}\n** Arguments **\n{rule}\n{flags}\n{rule}\n** Config **\n{rule}\n{cfg}")


def one_sentence(error: Exception) -> str:
    """The error's own text; of one that a loader's worker process passed on, the last line without the class name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "Original Traceback" in str(error):
        return lines[-1].split(": ", 1)[-1]
    return " ".join(line.strip() for line in lines)


def main(arguments: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):  # a console of few characters shows the others as \\u...; files are UTF-8
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = parse_arguments(arguments)
    from dear_plugin.engine.distributed import OfFirstProcess, is_loss_of_another
    from dear_plugin.engine.system import close_logger, log_only

    try:
        run(args)
    except OfFirstProcess:  # the first process shows it
        return 2
    except RuntimeError as error:
        if not is_loss_of_another(error):
            raise
        print("error: another of the processes ended, which says why", file=sys.stderr)
        return 2
    except (ValueError, OSError, FloatingPointError) as error:
        import traceback

        log_only(traceback.format_exc())
        print(f"error: {one_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; run the same command with --resume to continue after the last finished epoch", file=sys.stderr
        )
        return 130
    finally:
        close_logger()
    return 0


if __name__ == "__main__":
    sys.exit(main())
