"""Which runs a protocol consists of: folders, train.py's arguments, and which run needs which other."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOCOLS = ("base2new", "fewshot", "xd", "dg", "ablation")
ELEVEN = ("imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft",
          "sun397", "dtd", "eurosat", "ucf101")  # fmt: skip
SHAPES_TARGETS = ("shapes_color", "shapes_entity", "shapes_texture", "shapes_location")
SHAPES_DOMAINS = ("shapes_sketch", "shapes_rendition", "shapes_hard", "shapes_resampled")
TARGETS = {  # protocol -> source data set -> what it is tested on
    "xd": {"imagenet": ELEVEN[1:], "shapes": SHAPES_TARGETS},
    "dg": {"imagenet": ("imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r"), "shapes": SHAPES_DOMAINS},
}
UNTRAINED = ("ZeroshotCLIP",)
# What each ablation of DeAR changes; the paper ablates the role mask, the other rows are ours.
ABLATIONS: dict[str, tuple[str, ...]] = {
    "full": (),
    "no_role_mask": ("TRAINER.DEAR.ROLE_MASK", "False"),
    "no_token_mixing": ("TRAINER.DEAR.TOKEN_MIXING", "False"),
    "all_generalization": ("TRAINER.DEAR.ROLES", "all-generalization"),
    "no_reg": ("TRAINER.DEAR.LAMBDA_REG", "0.0"),
    "no_fusion_loss": ("TRAINER.DEAR.LAMBDA_FUSION", "0.0"),
    "beta_0": ("TRAINER.DEAR.BETA", "0.0"),
    "beta_1": ("TRAINER.DEAR.BETA", "1.0"),
}


@dataclass(frozen=True)
class Job:
    """One call of train.py. `needs`: the folder of the training it evaluates, "" if none."""

    folder: str
    arguments: tuple[str, ...]
    trains: bool
    needs: str = ""


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    protocol: str
    trainers: tuple[str, ...]
    datasets: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    shots: tuple[int, ...] = (16,)
    cfg: str = ""
    data: str = "data"
    output: str = "output"
    settings: tuple[str, ...] = ()


def default_cfg(trainer: str, dataset: str, protocol: str) -> str:
    """The method's config for a protocol, by the one rule in scripts/dear/common.sh."""
    call = 'source scripts/dear/common.sh; TRAINER="$1" DATASET="$2"; cfg_for "$3"'
    command = ["bash", "-c", call, "-", trainer, dataset, protocol]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"no config for {trainer} on {dataset}: {run.stderr.strip()}")
    return run.stdout.strip()


def jobs_of(plan: Plan) -> list[Job]:
    """All jobs, trainings before what needs them; seeds outermost, so that a first seed is complete early."""
    if plan.protocol not in PROTOCOLS:
        raise ValueError(f"unknown protocol {plan.protocol!r}; known: {', '.join(PROTOCOLS)}")
    for name in plan.datasets:
        if not (ROOT / "configs" / "datasets" / f"{name}.yaml").is_file():
            raise ValueError(f"data set {name!r} has no configs/datasets/{name}.yaml; give the file's stem")
    make = {"base2new": _base_to_new, "fewshot": _few_shot, "xd": _transfer, "dg": _transfer, "ablation": _ablation}
    found: dict[str, Job] = {}
    for seed in plan.seeds:
        for trainer in plan.trainers:
            for dataset in plan.datasets:
                for job in make[plan.protocol](plan, trainer, dataset, seed):
                    found.setdefault(job.folder, job)
    return list(found.values())


def _job(plan: Plan, trainer: str, dataset: str, seed: int, *, place: str, cfg: str, shots: int, classes: str = "all",
         protocol: str, model: str = "", extra: tuple[str, ...] = ()) -> Job:  # fmt: skip
    """`model`: the training's folder of an evaluation. `place`: the folder below the output, before the data set."""
    folder = os.path.join(plan.output, place, dataset, f"shots_{shots}", trainer, cfg, f"seed{seed}")
    untrained = trainer in UNTRAINED
    arguments = ["--root", plan.data, "--seed", str(seed), "--trainer", trainer,
                 "--dataset-config-file", f"configs/datasets/{dataset}.yaml",
                 "--config-file", f"configs/trainers/{trainer}/{cfg}.yaml", "--output-dir", folder]  # fmt: skip
    if model or untrained:
        arguments.append("--eval-only")
    if model and not untrained:
        arguments += ["--model-dir", model]
    arguments += [*plan.settings, *extra, "DATASET.NUM_SHOTS", str(shots), "DATASET.SUBSAMPLE_CLASSES", classes,
                  "PROTOCOL", protocol]  # fmt: skip
    return Job(folder, tuple(arguments), trains=not model and not untrained, needs="" if untrained else model)


def _base_to_new(plan: Plan, trainer: str, dataset: str, seed: int, *, prefix: str = "base2new",
                 protocol: str = "base2new", extra: tuple[str, ...] = ()) -> list[Job]:  # fmt: skip
    cfg, found = plan.cfg or default_cfg(trainer, dataset, "base2new"), []
    for shots in plan.shots:
        common = {"cfg": cfg, "shots": shots, "protocol": protocol, "extra": extra}
        train = _job(plan, trainer, dataset, seed, place=f"{prefix}/train_base", classes="base", **common)
        found += [train, _job(plan, trainer, dataset, seed, place=f"{prefix}/test_new", classes="new",
                              model=train.folder, **common)]  # fmt: skip
    return found


def _few_shot(plan: Plan, trainer: str, dataset: str, seed: int) -> list[Job]:
    cfg = plan.cfg or default_cfg(trainer, dataset, "fewshot")
    return [_job(plan, trainer, dataset, seed, place="fewshot", cfg=cfg, shots=shots, protocol="fewshot")
            for shots in plan.shots]  # fmt: skip


def _transfer(plan: Plan, trainer: str, source: str, seed: int) -> list[Job]:
    """xd and dg: one training on all classes of the source, shared by both, and a test on each target."""
    targets = TARGETS[plan.protocol].get(source)
    if targets is None:
        raise ValueError(f"{plan.protocol} has the sources {', '.join(TARGETS[plan.protocol])}, got {source!r}")
    cfg, found = plan.cfg or default_cfg(trainer, source, plan.protocol), []
    for shots in plan.shots:
        train = _job(plan, trainer, source, seed, place="source", cfg=cfg, shots=shots, protocol="source")
        found += [train, *(_job(plan, trainer, target, seed, place=plan.protocol, cfg=cfg, shots=shots,
                                protocol=plan.protocol, model=train.folder) for target in targets)]  # fmt: skip
    return found


def _ablation(plan: Plan, trainer: str, dataset: str, seed: int) -> list[Job]:
    if trainer != "DeAR":
        raise ValueError(f"ablation is about DeAR's parts, got --trainer {trainer}")
    return [job for name, extra in ABLATIONS.items()
            for job in _base_to_new(plan, trainer, dataset, seed, prefix=f"ablation/{name}",
                                    protocol=f"ablation:{name}", extra=extra)]  # fmt: skip
