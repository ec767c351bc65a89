"""One job in a process of its own: python run_job.py FOLDER [--trains] [--resume] -- ARGUMENTS OF train.py

Everything printed goes to FOLDER/console.log, how it ended to FOLDER/job.json. Exit codes: train.py's, and 75 where
another process works in the folder.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
for place in (str(SCRIPTS), str(SCRIPTS.parent)):
    if place not in sys.path:
        sys.path.insert(0, place)

from protocols.state import CONSOLE, HELD, lock, put_broken_result_aside, read_result, write_status  # noqa: E402


def run_job(folder: Path, arguments: list[str], *, resume: bool) -> int:
    """train.main in the locked folder; a finished folder is left as it is."""
    with lock(folder) as mine:
        if not mine:
            return HELD
        put_broken_result_aside(folder)
        if read_result(folder) is not None:
            return 0
        started = time.time()
        write_status(folder, state="running", arguments=arguments)
        with open(folder / CONSOLE, "a", encoding="utf-8", buffering=1) as console:
            with redirect_stdout(console), redirect_stderr(console):
                code = _train([*(["--resume", str(folder)] if resume else []), *arguments])
        if code == 0 and read_result(folder) is None:
            code = 1
        state = "finished" if code == 0 else "interrupted" if code == 130 else "failed"
        write_status(folder, state=state, code=code, seconds=time.time() - started, arguments=arguments)
        return code


def _train(arguments: list[str]) -> int:
    import train

    try:
        return train.main(arguments)
    except SystemExit as error:  # a flag that train.py does not know
        return error.code if isinstance(error.code, int) else 2
    except Exception:  # any other end is recorded as failed, with its traceback in the console's file
        traceback.print_exc()
        return 1


def main() -> int:
    cut = sys.argv.index("--")
    flags = sys.argv[2:cut]
    os.chdir(SCRIPTS.parent)
    return run_job(Path(sys.argv[1]), sys.argv[cut + 1 :], resume="--resume" in flags)


if __name__ == "__main__":
    sys.exit(main())
