"""The image: built from deploy/Dockerfile, and run as its user. ``make test-image`` runs this. It needs root, and
Docker or buildah. Without Docker debootstrap makes the base, so that no registry is needed. IMAGE_BASE names another
base."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from fastdeploy.core.process import stat_of
from fastdeploy.testing.process import free_port

ROOT = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # of this host, for a proxy between it and the packages
IMAGE, SECONDS = "fastdeploy-test", 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]
Started = Callable[..., subprocess.Popen]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


def has_docker() -> bool:
    return (
        shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Started]:
    """Build the image. Yield a function that starts a command in it, with variables, and returns the process."""
    if has_docker():
        base = os.environ.get("IMAGE_BASE")
        run(
            "docker",
            "build",
            "-f",
            "deploy/Dockerfile",
            "-t",
            IMAGE,
            *(["--build-arg", f"BASE={base}"] if base else []),
            ".",
        )

        def docker(*command: str, **variables: str) -> subprocess.Popen:
            flags = [f"--env={name}={value}" for name, value in variables.items()]
            return subprocess.Popen(["docker", "run", "--rm", "--network=host", *flags, IMAGE, *command])

        yield docker
        return
    folder = tmp_path_factory.mktemp("image")
    storage = ["--storage-driver", "vfs", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
    buildah = ["buildah", *storage]
    base = os.environ.get("IMAGE_BASE") or debian(buildah, folder)
    settings = folder / "pip.conf"
    settings.write_text("[global]\ncert = /host.crt\n" if CERTIFICATES.exists() else "")
    volumes = ["--volume", f"{settings}:/etc/pip.conf:ro"]
    volumes += ["--volume", f"{CERTIFICATES}:/host.crt:ro"] if CERTIFICATES.exists() else []
    built = ["--isolation", "chroot", "--build-arg", f"BASE={base}", *volumes]
    run(*buildah, "build", "--format", "docker", "-f", "deploy/Dockerfile", "-t", IMAGE, *built, ".")
    container = run(*buildah, "from", "--pull-never", f"localhost/{IMAGE}")
    described = json.loads(run(*buildah, "inspect", "--type", "image", f"localhost/{IMAGE}"))["Docker"]["config"]
    assert described["User"] == "10001:10001" and described["Healthcheck"]["Test"] == ["CMD", "fastdeploy-healthy"]

    def chroot(*command: str, **variables: str) -> subprocess.Popen:
        # buildah runs no entry point by itself.
        flags = [f"--env={name}={value}" for name, value in variables.items()]
        words = command if command[0].startswith("fastdeploy-") else (*described["Entrypoint"], *command)
        return subprocess.Popen([*buildah, "run", "--isolation", "chroot", *flags, container, "--", *words])

    yield chroot
    shutil.rmtree(folder, ignore_errors=True)


def debian(buildah: list[str], folder: Path) -> str:
    """Make the base image: a minimal Debian with the packages of this host's mirror. Return its name."""
    run("debootstrap", "--variant=minbase", "bookworm", str(folder / "debian"))
    container = run(*buildah, "from", "scratch")
    run(*buildah, "copy", container, str(folder / "debian"), "/")
    run(*buildah, "commit", "--rm", container, "localhost/debian-test")
    shutil.rmtree(folder / "debian")
    return "localhost/debian-test"


def test_the_image_serves_the_embedded_model_as_its_own_user_and_ends_in_order(start):
    assert start("check").wait(SECONDS) == 0
    port = str(free_port())
    server = start("serve", FASTDEPLOY_PORT=port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            deadline = time.monotonic() + SECONDS
            while not is_ready(http):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            reply = http.post("/v1/completions", json={"prompt": "12+34=", "max_tokens": 8})
            assert reply.status_code == 200 and reply.json()["choices"][0]["text"]
            assert http.post("/v1/pause", json={}).status_code == 403, "there is no control key"
            [engine] = subprocess.run(
                ["pgrep", "-u", "10001", "-f", "engine_main"], capture_output=True, text=True
            ).stdout.split()
            assert os.stat(f"/proc/{engine}").st_uid == 10001
            supervisor = int(stat_of(int(engine))[1])
        assert start("fastdeploy-healthy", FASTDEPLOY_PORT=port).wait(60) == 0
        assert start("fastdeploy-drain", "10", FASTDEPLOY_PORT=port).wait(60) == 0
        os.kill(supervisor, signal.SIGTERM)  # buildah, unlike Docker, does not pass it on
        assert server.wait(60) == 0
    finally:
        server.kill()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
