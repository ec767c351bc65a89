"""Whose output folder it is: a run is recorded in it, continued or refused, and a finished one is left alone."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear_plugin.engine.checkpoints import available_epochs, file_sha256, find_checkpoint, write_atomically
from dear_plugin.engine.config import OWN_KEYS, flatten, has_key
from dear_plugin.engine.distributed import first_only

RUN_FILE = "run.json"  # identity and resolved config, written when the run starts
RESULT_FILE = "result.json"  # written at the end only, so its presence means finished
STATE_FILE = "resume_state.pt"  # after each epoch; gone when the run is finished
SCHEMA = 1
_UNSET = object()  # a key of ours at its default is as good as absent: folders from before the key stay the same run
# Settings that change where a run reads and writes or what it shows, not what it computes.
_IRRELEVANT = (
    *("OUTPUT_DIR", "RESUME", "VERBOSE", "DATASET.ROOT", "TRAIN.PRINT_FREQ", "PROTOCOL"),
    *("DATALOADER.FEATURE_CACHE", "DATALOADER.FEATURE_CACHE_GIB"),
)


@dataclass(frozen=True)
class Folder:
    """What is in an output folder.

    status: "new", "restart" (an earlier attempt finished no epoch), "interrupted" or "finished".
    """

    path: Path
    status: str
    result: dict[str, Any] | None = None

    def sentence(self) -> str:
        """For a finished folder: what it holds and how to run again."""
        result = self.result or {}
        accuracy = result.get("accuracy_pct")
        shown = (
            f"accuracy {accuracy:.2f}% ({result['correct']:,} of {result['total']:,})"
            if accuracy is not None
            else "not tested"
        )
        return (
            f"{self.path} is finished: {shown}, {result.get('finished', 'time unknown')}. To run again "
            "remove the folder or give another --output-dir"
        )


def settings_of(cfg: Any) -> dict[str, Any]:
    """The settings that decide the result, "A.B.C" -> value."""
    return _deciding(dict(flatten(cfg)))


def _deciding(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _IRRELEVANT and OWN_KEYS.get(k, _UNSET) != v}


def config_digest(cfg: Any) -> str:
    """Hex sha256 over `settings_of`, keys sorted, as JSON."""
    return hashlib.sha256(json.dumps(settings_of(cfg), sort_keys=True).encode()).hexdigest()


def identity_of(cfg: Any, kind: str) -> dict[str, Any]:
    """What makes two runs the same; `kind` is "train" or "evaluation"."""
    classes = cfg.DATASET.SUBSAMPLE_CLASSES if has_key(cfg, "DATASET.SUBSAMPLE_CLASSES") else "all"
    return {
        "kind": kind,
        "trainer": cfg.TRAINER.NAME,
        "dataset": cfg.DATASET.NAME,
        "classes": classes,
        "shots": cfg.DATASET.NUM_SHOTS,
        "seed": cfg.SEED,
        "config_digest": config_digest(cfg),
    }


def inspect_folder(cfg: Any, kind: str) -> Folder:
    """Status of OUTPUT_DIR for this run. Another run's folder: ValueError that shows both values of what differs."""
    path = Path(cfg.OUTPUT_DIR)
    run = read_run(path)
    if run is None:
        _refuse_unrecorded(path)
        return Folder(path, "new")
    if run["identity"] != identity_of(cfg, kind):
        if not _has_output(path):  # it failed before it made anything, e.g. for a typing error
            return Folder(path, "restart")
        raise ValueError(
            f"{path} belongs to another run: {differences(run, cfg, kind)}. Give another --output-dir, or remove "
            "the folder"
        )
    result = read_result(path)
    if result is not None:
        return Folder(path, "finished", result)
    return Folder(path, "interrupted" if (path / STATE_FILE).is_file() else "restart")


def claim_folder(cfg: Any, kind: str) -> Folder:
    """`inspect_folder`, then record this run there. Finished: left alone. Interrupted: refused unless RESUME is set.

    Of several processes the first one does it.
    """
    return first_only(lambda: _claim(cfg, kind))


def _claim(cfg: Any, kind: str) -> Folder:
    folder = inspect_folder(cfg, kind)
    if folder.status == "finished":
        return folder
    if (folder.path / RESULT_FILE).is_file():
        broken = (folder.path / RESULT_FILE).replace(folder.path / f"{RESULT_FILE}.broken")
        print(f"Note: the result in {folder.path} was cut off (now {broken.name}): running again")
    if folder.status == "interrupted" and not cfg.RESUME:
        raise ValueError(
            f"{folder.path} holds an interrupted run of the same settings: add --resume to continue it, or remove "
            "the folder to start again"
        )
    if folder.status != "interrupted":
        record = {"schema": SCHEMA, "identity": identity_of(cfg, kind), "config": dict(flatten(cfg)), "started": now()}
        write_json_atomically(folder.path / RUN_FILE, record)
    return folder


def read_result(path: Path) -> dict[str, Any] | None:
    """The finished run's result; None where there is none, or where the file is cut off."""
    try:
        return _read_json(path / RESULT_FILE)
    except (FileNotFoundError, ValueError):
        return None


def read_run(path: Path) -> dict[str, Any] | None:
    """The record of the run in a folder; None if there is none."""
    if not (path / RUN_FILE).is_file():
        return None
    run = _read_json(path / RUN_FILE)
    if run.get("schema") != SCHEMA or not {"identity", "config"} <= run.keys():
        raise ValueError(
            f"{path / RUN_FILE} has schema {run.get('schema')!r}, wanted {SCHEMA}: remove the folder or give another "
            "--output-dir"
        )
    return run


def differences(run: dict[str, Any], cfg: Any, kind: str) -> str:
    """ "dataset is A there, B here; ...": the named parts first, then up to five settings."""
    here, there = identity_of(cfg, kind), run["identity"]
    found = [
        f"{name} is {there.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if name != "config_digest" and there.get(name) != value
    ]
    shown_already = {"TRAINER.NAME", "DATASET.NAME", "DATASET.SUBSAMPLE_CLASSES", "DATASET.NUM_SHOTS", "SEED"}
    settings, others = settings_of(cfg), _deciding(run["config"])
    keys = [
        key
        for key in sorted(settings.keys() | others.keys())
        if key not in shown_already and settings.get(key, "absent") != others.get(key, "absent")
    ]
    found += [
        f"{key} is {run['config'].get(key, 'absent')!r} there, {dict(flatten(cfg)).get(key, 'absent')!r} here"
        for key in keys[:5]
    ]
    return "; ".join(found) + (f"; and {len(keys) - 5} more settings" if len(keys) > 5 else "")


def same_weights(result: dict[str, Any], model_dir: str, epoch: int | None) -> bool:
    """Whether an evaluation's stored result was made from the files that would be loaded now."""
    loaded = result.get("loaded") or {}
    if not loaded:
        return not model_dir
    return all(
        file_sha256(find_checkpoint(model_dir, name, epoch)) == entry["sha256"] for name, entry in loaded.items()
    )


def check_model_dir(model_dir: str | Path, cfg: Any) -> None:
    """A recorded training folder must be of the same trainer and backbone; unfinished training is said."""
    path = Path(model_dir)
    if not path.is_dir():
        raise FileNotFoundError(f"no model folder {path}: give the training's output folder as --model-dir")
    run = read_run(path)
    if run is None:
        return
    for name, key, here in (
        ("trainer", "TRAINER.NAME", cfg.TRAINER.NAME),
        ("backbone", "MODEL.BACKBONE.NAME", cfg.MODEL.BACKBONE.NAME),
    ):
        there = run["config"].get(key)
        if there != here:
            raise ValueError(
                f"{path} was trained with {name} {there!r}, this run has {here!r}: check --model-dir and {key}"
            )
    if not (path / RESULT_FILE).is_file():
        print(f"Note: the training in {path} is not finished")


def _has_output(path: Path) -> bool:
    return (
        (path / RESULT_FILE).is_file()
        or (path / STATE_FILE).is_file()
        or any(available_epochs(folder) for folder in path.iterdir() if folder.is_dir())
    )


def _refuse_unrecorded(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--output-dir {path} is a file; wanted a folder")
    log = path / "log.txt"
    if path.is_dir() and (_has_output(path) or (log.is_file() and not _is_written_now(log))):
        raise ValueError(
            f"{path} holds a run that this program did not record (no {RUN_FILE}): give another --output-dir, or "
            "remove the folder"
        )


def _is_written_now(log: Path) -> bool:
    """Whether standard output goes there: CoOp's train.py opens its log before the trainer is made."""
    name = getattr(getattr(sys.stdout, "file", None), "name", None)
    return isinstance(name, (str, Path)) and Path(name).resolve() == log.resolve()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}): remove the folder or give another --output-dir"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}, wanted a JSON object: remove the folder")
    return data


def write_json_atomically(path: str | Path, data: Any) -> None:
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def now() -> str:
    """Local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
