"""The Slurm script, run by a real shell; Slurm's own commands, the peer and the trainer are stand-ins that tell."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer.main
import weightsync.peer.__main__
from tests.k8s.helm import ROOT
from tests.waiting import wait_until
from trainer.config import FaultsConfig
from weightsync.control.hosts import check_host

SCRIPT = ROOT / "k8s" / "slurm" / "trainer.sbatch"
STAND_INS = {
    "srun": """
        for option; do
            case $option in --nodes=*) nodes=${option#*=};; --ntasks-per-node=*) tasks=${option#*=};; esac
        done
        while [ "$1" != python ] && [ "$1" != bash ]; do shift; done
        [ "$nodes" = 1 ] && exec "$@"
        export SLURM_NTASKS=$((nodes * tasks))
        trap 'kill -TERM $(jobs -p)' TERM
        for ((n = 0; n < SLURM_NTASKS; n++)); do SLURM_PROCID=$n SLURM_LOCALID=$((n % tasks)) "$@" & done
        while wait -n; [ -n "$(jobs -pr)" ]; do :; done""",
    "scontrol": 'echo "scontrol $*" >> "$TOLD"',
    "hotswap": """
        trap 'echo "peer stopped" >> "$TOLD"; exit 0' TERM
        mkdir -p "$HOTSWAP_ARENA"; touch "$HOTSWAP_ARENA/slot"
        echo "hotswap $*" >> "$TOLD"; echo "peer $HOTSWAP_HOST $HOTSWAP_STORE" >> "$TOLD"
        while :; do sleep 0.05; done""",
    "python": """
        trap 'exit "${LEFT:-143}"' TERM
        while ! grep -q '^peer ' "$TOLD" 2>/dev/null; do sleep 0.05; done
        echo "python $*" >> "$TOLD"
        echo "rank ${RANK:-} ${LOCAL_RANK:-} ${WORLD_SIZE:-} ${MASTER_ADDR:-} ${HOTSWAP_ADDRESS:-none}" >> "$TOLD"
        echo "admin key of $(printf %s "$HOTSWAP_ADMIN_KEY" | wc -c)" >> "$TOLD"
        [ -n "${FOREVER:-}" ] || exit "$STATUS"
        while :; do sleep 0.05; done""",
}


class Job:
    def __init__(self, directory: Path) -> None:
        bin_ = directory / "bin"
        bin_.mkdir()
        for name, body in STAND_INS.items():
            (bin_ / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (bin_ / name).chmod(0o755)
        self.log, key = directory / "told", directory / "admin.key"
        key.write_text("0123456789abcdef")
        self.env = {
            "PATH": f"{bin_}:{os.environ['PATH']}", "TOLD": str(self.log), "SLURM_JOB_ID": "7", "LINGER": "0",
            "CONFIG": "run.yaml", "HOTSWAP_MODEL": "demo", "HOTSWAP_STORE": "etcd://e:2379",
            "HOTSWAP_ARENA": str(directory / "arena"), "HOTSWAP_ADMIN_KEY_FILE": str(key),
            "HOTSWAP_ADDRESS": "10.1.2.3", "STATUS": "0",
        }  # fmt: skip

    @contextlib.contextmanager
    def started(self, *options: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        """In a session of its own, which ends with the test."""
        command = ["bash", str(SCRIPT), *options]
        with subprocess.Popen(command, env={**self.env, **env}, text=True, start_new_session=True) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def told(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def said(self, beginning: str) -> str:
        return next(line for line in self.told() if line.startswith(beginning))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_run_that_succeeds(job: Job) -> None:
    with job.started("--set", "steps=3") as process:
        assert process.wait(60) == 0
    assert job.told()[-1] == "peer stopped"
    assert not Path(job.env["HOTSWAP_ARENA"]).exists()
    assert job.said("admin key") == "admin key of 16"
    dash, module, *options = job.said("python").split()[1:]
    assert (dash, module) == ("-m", trainer.main.__name__)
    parsed = trainer.main._parser().parse_args(options)
    assert (parsed.config, parsed.set) == ("run.yaml", ["steps=3"])


def test_on_several_nodes_each_task_is_a_rank(job: Job) -> None:
    with job.started(SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="3") as process:
        assert process.wait(60) == 0
    ranks = sorted(line.split()[1:] for line in job.told() if line.startswith("rank "))
    assert ranks == [[str(n), str(n % 3), "6", "10.1.2.3", "none"] for n in range(6)]
    commands = {line for line in job.told() if line.startswith("python")}
    assert commands == {"python -m trainer.main --config run.yaml"}


def test_ranks_of_several_nodes_save_and_go_on_later(job: Job) -> None:
    with job.started(SLURM_JOB_NUM_NODES="2", RANKS_PER_NODE="1", FOREVER="yes", LEFT="0") as process:
        wait_until(lambda: sum(line.startswith("admin key") for line in job.told()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert "scontrol requeue 7" in job.told()


def test_the_peer_takes_its_options(job: Job) -> None:
    with job.started() as process:
        assert process.wait(60) == 0
    command, *options = job.said("hotswap").split()[1:]
    assert command == "peer"
    _, host, store = job.said("peer").split()
    assert check_host(host)
    parsed = weightsync.peer.__main__._parser().parse_args([*options, "--host-id", host, "--store", store])
    assert (parsed.model, parsed.listen, parsed.transport) == ("demo", "10.1.2.3:8003", "auto")


def test_a_run_that_fails_ends_the_job_with_its_status(job: Job) -> None:
    with job.started(STATUS="2") as process:
        assert process.wait(60) == 2
    assert job.told()[-1] == "peer stopped"
    assert not any(line.startswith("scontrol") for line in job.told())


@pytest.mark.parametrize("again", ["yes", "no"])
def test_a_run_out_of_time_saves_and_goes_on_later(job: Job, again: str) -> None:
    with job.started(FOREVER="yes", REQUEUE=again) as process:
        wait_until(lambda: any(line.startswith("admin key") for line in job.told()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert ("scontrol requeue 7" in job.told()) == (again == "yes")
    assert job.told()[-1] == "peer stopped"


@pytest.mark.parametrize("before", ["hotswap peer", "srun", "trainer=", "status=0"])
def test_a_signal_while_the_trainer_starts_is_not_lost(job: Job, tmp_path: Path, before: str) -> None:
    """The shell sends SIGTERM to itself right before a command of the script."""
    (tmp_path / "signal.sh").write_text(f"""
        unset BASH_ENV  # of this shell, not of the stand-ins
        trap 'case $BASH_COMMAND in "{before}"*) kill -TERM $$;; esac' DEBUG""")
    with job.started(FOREVER="yes", BASH_ENV=str(tmp_path / "signal.sh")) as process:
        assert process.wait(60) == 143
    assert "scontrol requeue 7" in job.told()
    assert not Path(job.env["HOTSWAP_ARENA"]).exists()


def test_nothing_is_started_without_what_a_run_needs(job: Job) -> None:
    for missing in ("CONFIG", "HOTSWAP_MODEL", "HOTSWAP_STORE"):
        with job.started(**{missing: ""}) as process:
            assert process.wait(60) != 0
    assert job.told() == []


def test_slurm_leaves_time_to_save() -> None:
    text = SCRIPT.read_text()
    before = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert before is not None
    assert int(before[1]) > FaultsConfig().grace_s
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False, timeout=60).returncode == 0
