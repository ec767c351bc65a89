"""What is in a job's folder, and the lock that lets one process at a time work there."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RESULT, STATUS, LOCK, CONSOLE, RESUME_STATE = "result.json", "job.json", ".lock", "console.log", "resume_state.pt"
HELD = 75  # exit code of a job whose folder another process works in (EX_TEMPFAIL)


def read_result(folder: Path) -> dict | None:
    """The finished result; None where there is none, or where the file is cut off or no result."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "complete" else None


def put_broken_result_aside(folder: Path) -> bool:
    """Rename a result.json that is no result, so that the run is done again; True if there was one."""
    if (folder / RESULT).is_file() and read_result(folder) is None:
        (folder / RESULT).replace(folder / f"{RESULT}.broken")
        return True
    return False


def write_status(folder: Path, **fields: object) -> None:
    """job.json, in one step."""
    partial = folder / f".{STATUS}.{os.getpid()}"
    partial.write_text(json.dumps(fields | {"pid": os.getpid(), "time": time.time()}, indent=1) + "\n", "utf-8")
    partial.replace(folder / STATUS)


def read_status(folder: Path) -> dict:
    try:
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def state_of(folder: Path) -> str:
    """ "finished", "failed", "running" (elsewhere), "interrupted" (killed, or an old run cut short) or "new".

    Who was killed with -9 leaves job.json saying "running", but not the lock: the kernel takes that back.
    """
    if read_result(folder) is not None:
        return "finished"
    if not folder.is_dir():
        return "new"
    with lock(folder) as mine:
        if not mine:
            return "running"
    said = read_status(folder).get("state")
    if said == "failed":
        return "failed"
    return "interrupted" if said == "running" or (folder / RESUME_STATE).is_file() else "new"


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; gives False where another process holds it. Ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def last_error(folder: Path) -> str:
    """The sentence a failed job ended with."""
    try:
        lines = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "it left no output"
    said = [line for line in lines if line.startswith("error: ")]
    return (said or lines or ["it left no output"])[-1]
