"""How a job is started: as a process here, or through submitit on a cluster. Both give handles with poll()."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from protocols.jobs import ROOT, Job
from protocols.state import state_of

RUN_JOB = Path(__file__).with_name("run_job.py")


def command(job: Job, *, resume: bool) -> list[str]:
    """The call that runs `job` in this Python."""
    flags = ["--resume"] if resume and job.trains else []
    return [sys.executable, str(RUN_JOB), job.folder, *flags, "--", *job.arguments]


class LocalLauncher:
    """Processes on this machine; with `devices` each of the `jobs` places has its own GPU."""

    def __init__(self, jobs: int, devices: tuple[str, ...] = ()) -> None:
        self.devices, self.used = devices, []
        threads = max(1, (os.cpu_count() or 1) // jobs)
        self.environment = {"OMP_NUM_THREADS": str(threads)} | os.environ

    def start(self, job: Job, *, resume: bool) -> LocalHandle:
        environment, device = self.environment, None
        if self.devices:
            device = min(self.devices, key=self.used.count)
            self.used.append(device)
            environment = environment | {"CUDA_VISIBLE_DEVICES": device}
        process = subprocess.Popen(command(job, resume=resume), cwd=ROOT, env=environment, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return LocalHandle(process, lambda: self.used.remove(device) if device else None)


class LocalHandle:
    def __init__(self, process: subprocess.Popen, on_end) -> None:
        self.process, self.on_end = process, on_end

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        code = self.process.poll()
        if code is not None and self.on_end:
            self.on_end()
            self.on_end = None
        return code

    log = ""  # the job's own console.log has everything

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


class SubmititLauncher:
    """Jobs through submitit; `cluster` None takes Slurm, "local" submitit's own local executor."""

    def __init__(self, folder: Path, *, cluster: str | None = None, parameters: dict | None = None) -> None:
        if importlib.util.find_spec("submitit") is None:
            raise ValueError("--launcher slurm needs the package submitit: pip install submitit")
        import submitit

        self.submitit = submitit
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster or "slurm")
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"--launcher slurm: {error} Without a cluster take --launcher local") from error
        try:
            self.executor.update_parameters(**({"timeout_min": 24 * 60} | (parameters or {})))
        except (NameError, AssertionError, ValueError) as error:
            raise ValueError(f"--slurm: {' '.join(str(error).split())}") from error

    def start(self, job: Job, *, resume: bool) -> SubmititHandle:
        call = self.submitit.helpers.CommandFunction(command(job, resume=resume), verbose=False, cwd=ROOT)
        return SubmititHandle(self.executor.submit(call), Path(job.folder))


class SubmititHandle:
    """The folder decides, not submitit: who kills submitit's process leaves the run itself alive for a while."""

    def __init__(self, job, folder: Path) -> None:
        self.job, self.folder = job, folder

    def poll(self) -> int | None:
        """None while submitit has the job or a process works in its folder; else 0 if it left a result, or 1."""
        state = state_of(self.folder) if self.job.done() else "running"
        return None if state == "running" else int(state != "finished")

    def stop(self) -> None:
        self.job.cancel()

    @property
    def log(self) -> str:
        """Where the launcher's own output is, for a job that left no word."""
        return str(self.job.paths.stderr)
