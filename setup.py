"""The package list of megadapo; pyproject.toml has everything else.

kernels/ stays a top-level folder without `__init__.py`, because Hugging Face's `kernels` package
owns that name, and is installed as megadapo.kernels. configs/ is installed as megadapo.configs,
with the quickstart's model.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megadapo", "megadapo.*"]),
        *("megadapo.kernels", "megadapo.kernels.cpu", "megadapo.kernels.policy_head"),
        "megadapo.configs",
    ],
    package_data={
        "megadapo.configs": ["*.toml", "*/*.toml", "schema.json", "quickstart-base/*"],
        "megadapo.kernels.cpu": ["*.c", "*.h"],
        "megadapo.models": ["configs/*/config.json"],
        "megadapo.observe.report": ["assets/*", "assets/uplot/*"],
        "megadapo.run.export": ["*.jinja"],
    },
)
