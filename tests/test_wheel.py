"""Programs that `pip install` of the built wheels gives: a `hotswap` that serves, publishes and trains, away from the
checkout; and of the client's wheel alone, a publisher.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.ports import free_port
from tests.etcd import Etcd
from tests.live import VLLM_ARGS
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.broad, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "trainer", "weightsync", "loadtest")


def without_checkout() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By distribution."""
    built = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / "scripts/wheels.sh", sys.executable, built], check=True, timeout=300)
    made = {file.name.partition("-")[0]: file for file in built.glob("*.whl")}
    assert made.keys() == {"hotswap", "hotswap_client", "hotswap_bench"}
    return made


@pytest.fixture(scope="module")
def hotswap(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment that has the pinned packages and the wheels, and nothing of the checkout."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    install = [str(ROOT / "scripts/install.sh"), str(environment), str(ROOT / "requirements/cpu.txt")]
    subprocess.run(install, check=True, timeout=600, cwd=environment.parent)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", *wheels.values()]
    subprocess.run(pip, check=True, timeout=120, env=without_checkout())
    return environment / "bin/hotswap"


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, Any]:
    """Options of subprocess: where nothing is to be found but what is installed."""
    return {"env": without_checkout() | {"HOTSWAP_STATE_DIR": str(tmp_path / "state")}, "cwd": tmp_path}


def test_every_file_is_in_one_of_them(wheels: dict[str, Path]) -> None:
    files = {name: set(zipfile.ZipFile(wheel).namelist()) for name, wheel in wheels.items()}
    tracked = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=ROOT, text=True).split()
    packed = {name: {file for file in found if ".dist-info/" not in file} for name, found in files.items()}
    assert sorted(set(tracked) - {"loadtest/pyproject.toml"}) == sorted(
        file for found in packed.values() for file in found
    )
    folders = {name: {file.partition("/")[0] for file in found} for name, found in packed.items()}
    assert folders == {
        "hotswap": {"server", "trainer"},
        "hotswap_client": {"weightsync"},
        "hotswap_bench": {"loadtest"},
    }


PUBLISH = """
import sys, numpy as np, weightsync
url = sys.argv[1]
weightsync.SyncStore(url).close()
with weightsync.Publisher(url, model="demo") as publisher:
    for dtype in (np.float32, np.float64):
        print(publisher.publish({"module.a": np.ones((3, 5), dtype)}, cast=True, strip="module.", activate=False))
    try:
        publisher.activate(2, timeout_s=0.1)
    except weightsync.WeightSyncError as error:
        print(type(error).__name__)  # no server runs, which is seen when the time is over
for name in weightsync.__all__:
    getattr(weightsync, name)
try:
    weightsync.RemotePublisher("http://127.0.0.1:9", "key", "demo", sign=sys.argv[2]).publish(np.ones(2))
except weightsync.WeightSyncError as error:
    print(type(error).__name__)
print(sorted({"torch", "vllm", "server"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with contextlib.closing(Etcd()) as running:
        yield running


PYTHONS = {"3.11": sys.executable} | {
    version: str(found[-1])
    for version in ("3.10", "3.12", "3.13")
    if (found := sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")))
}


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("extras", ["", "[bucket,sign,etcd]"])
def test_the_client_publishes_by_itself(
    wheels: dict[str, Path], tmp_path: Path, etcd: Etcd, version: str, extras: str
) -> None:
    subprocess.run([PYTHONS[version], "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python, key = tmp_path / "venv/bin/python", tmp_path / "key.pem"
    pip = [python, "-m", "pip", "install", "--quiet", f"{wheels['hotswap_client']}{extras}"]
    subprocess.run(pip, check=True, timeout=300, env=without_checkout())
    told = PUBLISH if extras else PUBLISH.replace("weightsync.__all__", '["RemotePublisher", "Draft", "open_store"]')
    told = told if extras else told.replace(", sign=sys.argv[2]", "")
    if extras:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        form = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        key.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form))
    url = etcd.url(f"client-{version}") if extras else f"sqlite://{tmp_path}/store.db"
    env = without_checkout() | {"HOTSWAP_ARENA": str(tmp_path / "slots")}
    done = subprocess.run([python, "-c", told, url, key], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.split() == ["1", "2", "SwapError", "PublishError", "[]"], done.stderr


@pytest.mark.parametrize("command", [["--help"], ["up", "--help"], ["train", "--help"], ["bench", "--help"]])
def test_it_says_what_it_can_do(hotswap: Path, alone: dict[str, Any], command: list[str]) -> None:
    done = subprocess.run([hotswap, *command], capture_output=True, text=True, check=False, **alone)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_it_serves_and_swaps(hotswap: Path, alone: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    url, log = f"http://127.0.0.1:{(port := free_port())}", alone["cwd"] / "said"
    up = [hotswap, "up", "--model", checkpoints["say-0"], "--name", "toy", "--port", str(port), *VLLM_ARGS]
    with log.open("wb") as said:
        server = subprocess.Popen([*up, "--kv-cache-gib", "0.06"], stdout=said, stderr=said, **alone)

    def ready() -> bool:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz").status_code == 200
        return False

    def answers() -> set[int]:
        body = {"prompt_token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True, "stream": False}
        return set(httpx.post(f"{url}/generate", json=body).json()["choices"][0]["token_ids"])

    try:
        wait_until(ready, 300, what=lambda: log.read_text())
        assert answers() == {100}
        push = [hotswap, "weights", "push", checkpoints["say-1"]]
        done = subprocess.run(push, capture_output=True, text=True, check=False, **alone)
        assert done.returncode == 0, done.stderr
        assert answers() == {101}
    finally:
        server.terminate()
        server.wait(60)
