"""Run a whole protocol: every method, data set and seed, several at a time; what is finished is skipped.

    python scripts/run_protocol.py base2new --trainer DeAR CoOp --dataset caltech101 dtd --seeds 1 2 3 --jobs 2
    python scripts/run_protocol.py xd --trainer DeAR --dataset imagenet       # --dataset is the source
    python scripts/run_protocol.py fewshot --trainer DeAR --dataset shapes --shots 1 2 4 8 16 --dry-run

Several calls may share one --output: a job's folder is worked in by one process at a time. What failed in an earlier
call is tried last, and failures are listed at the end.
Exit codes: 0 all finished, 1 some failed or were left, 2 bad input, 130 interrupted (--resume continues).
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from protocols.jobs import ELEVEN, PROTOCOLS, ROOT, Job, Plan, jobs_of  # noqa: E402
from protocols.launchers import LocalLauncher, SubmititLauncher  # noqa: E402
from protocols.state import HELD, last_error, read_result, read_status, state_of  # noqa: E402

FEW_SHOTS = (1, 2, 4, 8, 16)
POLL_S = 0.2


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("protocol", choices=PROTOCOLS)
    add("--trainer", nargs="+", default=["DeAR"])
    add("--dataset", nargs="+", default=None, help="stems of configs/datasets; left out: the eleven, or imagenet")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--shots", nargs="+", type=int, default=None, help="left out: 16; fewshot: 1 2 4 8 16")
    add("--cfg", default="", help="stem of the method's YAML; left out: the published one for the protocol")
    add("--data", default=os.environ.get("DATA", str(ROOT / "data")), help="folder of the data sets ($DATA)")
    add("--output", default=str(ROOT / "output"))
    add("--jobs", type=int, default=1, help="how many at a time")
    add("--devices", nargs="+", default=[], help="GPUs to spread the jobs over, e.g. 0 1")
    add("--dry-run", action="store_true", help="show the jobs and their state, run nothing")
    add("--resume", action="store_true", help="continue what was interrupted")
    add("--launcher", choices=("local", "slurm"), default="local")
    add("--cluster", default=None, help="submitit's cluster: slurm, or local to try it without one")
    add("--slurm", nargs="+", default=[], metavar="NAME=VALUE", help="submitit's parameters, e.g. slurm_partition=gpu")
    add("--set", nargs="+", default=[], metavar="KEY VALUE", help="config overrides for every job")
    return parser.parse_args(arguments)


def plan_of(args: argparse.Namespace) -> Plan:
    if len(args.set) % 2:
        raise ValueError(f"--set wants KEY VALUE pairs, got {' '.join(args.set)}")
    if args.jobs < 1:
        raise ValueError(f"--jobs is {args.jobs}, wanted 1 or more")
    source = ("imagenet",) if args.protocol in ("xd", "dg") else ELEVEN
    shots = args.shots or (FEW_SHOTS if args.protocol == "fewshot" else (16,))
    return Plan(args.protocol, tuple(args.trainer), tuple(args.dataset or source), tuple(args.seeds), tuple(shots),
                args.cfg, os.path.abspath(os.path.expanduser(args.data)), os.path.abspath(args.output),
                tuple(args.set))  # fmt: skip


class Runner:
    """Works a job list off; keeps no state that is not in the folders."""

    def __init__(self, jobs: list[Job], launcher, *, places: int, resume: bool, output: str) -> None:
        states = {job.folder: state_of(Path(job.folder)) for job in jobs}
        self.jobs, self.launcher, self.places, self.resume, self.output = jobs, launcher, places, resume, output
        self.ended = {job.folder: finished(job) for job in jobs if states[job.folder] == "finished"}
        self.skipped = len(self.ended)
        self.failed_before = {folder for folder, state in states.items() if state == "failed"}
        left = [job for job in jobs if job.folder not in self.ended]
        self.queue = sorted(left, key=lambda job: job.folder in self.failed_before)  # stable: failures last
        self.running: dict[str, tuple[Job, object, float]] = {}
        self.seconds: list[float] = []

    def run(self) -> None:
        print(f"{len(self.jobs)} jobs, {self.skipped} finished before, {len(self.queue)} to do", flush=True)
        try:
            while self.queue or self.running:
                self.start_ready()
                self.collect()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            for _, handle, _ in self.running.values():
                handle.stop()
            raise

    def start_ready(self) -> None:
        for job in list(self.queue):
            if len(self.running) >= self.places:
                return
            waits = job.needs and self.ended.get(job.needs) != "finished"
            if waits:
                in_plan = any(other.folder == job.needs for other in self.jobs)
                if in_plan and job.needs not in self.ended:
                    continue
                self.end(job, f"not run: the training in {self.short(job.needs)} is not finished")
                continue
            state = state_of(Path(job.folder))
            if state == "running":  # by another call: look again later
                continue
            if state == "finished":
                self.end(job, finished(job))
                continue
            if state == "interrupted" and not self.resume and job.trains:
                self.end(job, "interrupted before: add --resume to continue it")
                continue
            self.queue.remove(job)
            self.running[job.folder] = (job, self.launcher.start(job, resume=self.resume), time.time())

    def collect(self) -> None:
        """What has ended: by its result, by the sentence it left, or killed, which leaves neither."""
        for folder, (job, handle, started) in list(self.running.items()):
            code = handle.poll()
            if code is None:
                continue
            del self.running[folder]
            if code == HELD:
                self.queue.append(job)
            elif state_of(Path(folder)) == "finished":
                self.seconds.append(time.time() - started)
                self.end(job, "finished")
            elif read_status(Path(folder)).get("state") == "failed":
                self.end(job, f"failed: {last_error(Path(folder))}")
            else:
                log = f" (see {handle.log})" if handle.log else ""
                self.end(job, f"killed: its process ended with code {code} before it could say why{log}; --resume "
                              "continues it")  # fmt: skip

    def end(self, job: Job, outcome: str) -> None:
        self.ended[job.folder] = outcome
        if job in self.queue:
            self.queue.remove(job)
        result = read_result(Path(job.folder)) or {}
        shown = f" {result['accuracy_pct']:.2f}%" if result.get("accuracy_pct") is not None else ""
        print(f"[{len(self.ended)}/{len(self.jobs)}] {self.short(job.folder)}: {outcome}{shown}{self.remaining()}",
              flush=True)  # fmt: skip

    def remaining(self) -> str:
        left = len(self.queue) + len(self.running)
        if not left or not self.seconds:
            return ""
        seconds = statistics.mean(self.seconds) * left / self.places
        return f"; {left} left, about {max(1, round(seconds / 60))} min"

    def short(self, folder: str) -> str:
        return os.path.relpath(folder, self.output)

    def problems(self) -> list[str]:
        return [f"{self.short(folder)}: {outcome}" for folder, outcome in self.ended.items() if outcome != "finished"]


def finished(job: Job) -> str:
    """ "finished", or how the call that filled the folder differs from this one."""
    before = read_status(Path(job.folder)).get("arguments")
    if before is None or before == list(job.arguments):
        return "finished"
    there, here = (" ".join(word for word in one if word not in two) for one, two in
                   ((before, job.arguments), (job.arguments, before)))  # fmt: skip
    return f"holds a finished run of other settings ({there or '-'} there, {here or '-'} here): give another --output"


def show(jobs: list[Job], output: str) -> None:
    for job in jobs:
        print(f"{state_of(Path(job.folder)) if Path(job.folder).is_dir() else 'new':<12} "
              f"{os.path.relpath(job.folder, output)}")
        print(f"             scripts/train.py {shlex.join(job.arguments)}")
    print(f"{len(jobs)} jobs")


def make_launcher(args: argparse.Namespace, plan: Plan):
    if args.launcher == "local":
        return LocalLauncher(args.jobs, tuple(args.devices))
    pairs = dict(pair.partition("=")[::2] for pair in args.slurm)
    values = {name: int(value) if value.isdigit() else value for name, value in pairs.items()}
    return SubmititLauncher(Path(plan.output) / "submitit", cluster=args.cluster, parameters=values)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        plan = plan_of(args)
        jobs = jobs_of(plan)
        if args.dry_run:
            show(jobs, plan.output)
            return 0
        runner = Runner(jobs, make_launcher(args, plan), places=args.jobs, resume=args.resume, output=plan.output)
    except ValueError as error:
        print(f"run_protocol.py: {error}", file=sys.stderr)
        return 2
    try:
        runner.run()
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume continues", file=sys.stderr)
        return 130
    problems = runner.problems()
    print(f"{len(jobs) - len(problems)} of {len(jobs)} finished" + "".join(f"\n  {line}" for line in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
