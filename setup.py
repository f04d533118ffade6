"""Packaging. With a compiler the wheel has the C++ ops and is for this platform. Without a compiler the wheel is for
any platform, and the Paddle reference ops run. Paddle's CUDA build is taken where it is installed already."""

import re
import runpy
import sysconfig
from importlib import metadata
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
OPS = runpy.run_path(str(HERE / "custom_ops" / "build.py"))
VERSION = runpy.run_path(str(HERE / "fastdeploy" / "core" / "process.py"))["VERSION"]


class BuildPy(build_py):
    """Builds the C++ ops beside the Python files. An editable install leaves them to ``custom_ops/build.py``."""

    def library(self) -> Path:
        return Path(self.build_lib, OPS["LIBRARY"].relative_to(HERE))

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            OPS["build"](self.library())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = [str(self.library())] if self.library().exists() else []
        return [*super().get_outputs(include_bytecode), *built]


class BdistWheel(bdist_wheel):
    """Gives the wheel the tag ``py3-none-PLATFORM`` if it has the C++ ops, else ``py3-none-any``."""

    def get_tag(self) -> tuple[str, str, str]:
        built = self.get_finalized_command("build_py").library().exists()
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        return ("py3", "none", platform if built else "any")


def paddle_for_cuda_is_installed() -> bool:
    """Return whether a CUDA build of Paddle is installed. It serves as well, and has the same files as paddlepaddle."""
    try:
        metadata.distribution("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


RUNTIME = [
    "blake3>=1.0",
    "fastapi>=0.115",
    "httptools>=0.6",
    "httpx>=0.27",
    "llguidance>=1.9,<2",
    "msgspec>=0.19",
    "numpy>=1.26",
    "prometheus-client>=0.21",
    "pydantic>=2.9",
    "pyyaml>=6",
    "pyzmq>=26",
    "rich>=13",
    "safetensors>=0.5",
    "tokenizers>=0.21",
    "transformers>=4.56",
    "jinja2>=3.1",
    "uvicorn>=0.34",
    "uvloop>=0.21",
    "xxhash>=3.5",
    "zstandard>=0.23",
]
TRL = ["trl==1.16.0", "accelerate>=1.10", "datasets>=4", "aiohttp>=3.11", "peft==0.21.2", "requests>=2.31"]
LINT = ["clang-format==23.1.5", "mypy==2.4.1", "pre-commit>=4", "ruff==0.17.6"]
PLOTS = ["matplotlib>=3.9,<4"]
TESTING = ["pytest>=8"]  # for fastdeploy.testing.plugin
TEST = [
    *PLOTS,
    "hypothesis==6.170.15",  # another version draws other examples
    "anthropic>=0.60",
    "openai>=1.60",
    "peft==0.21.2",
    *TESTING,
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "schemathesis==4.32.5",
    "torch==2.13.0",
]

RAY = ["ray[default]>=2.60,<3"]  # default: the dashboard
UI_TEST = ["playwright>=1.50"]  # drives Debian's Chromium; downloads no browser

setup(
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    name="fastdeploy-cpu",
    version=VERSION,
    description="A Paddle-based LLM serving engine for reinforcement-learning rollouts",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["fastdeploy", "fastdeploy.*"]),
    package_data={
        "fastdeploy.embedded": ["model/*"],
        "fastdeploy.http.ui": ["*.html", "*.js", "*.css"],
        "fastdeploy.model_executor.ops": ["*.so"],
    },
    install_requires=RUNTIME + ([] if paddle_for_cuda_is_installed() else ["paddlepaddle>=3.3,<3.4"]),
    extras_require={
        "testing": TESTING,
        "test": TEST,
        "trl": TRL,
        "lint": LINT,
        "plots": PLOTS,
        "ray": RAY,
        "ui-test": UI_TEST,
    },
    entry_points={
        "console_scripts": ["fastdeploy=fastdeploy.entrypoints.cli:main"],
        "pytest11": ["fastdeploy=fastdeploy.testing.plugin"],
    },
)
