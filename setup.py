"""The package list of megadapo; pyproject.toml has everything else.

kernels/ stays a top-level folder without `__init__.py`, because Hugging Face's `kernels` package
owns that name, and is installed as megadapo.kernels.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megadapo", "megadapo.*"]),
        *("megadapo.kernels", "megadapo.kernels.cpu", "megadapo.kernels.policy_head"),
    ],
    package_data={
        "megadapo.kernels.cpu": ["*.c", "*.h"],
        "megadapo.models": ["configs/*/config.json"],
        "megadapo.observe.report": ["assets/*", "assets/uplot/*"],
        "megadapo.run.export": ["*.jinja"],
    },
)
