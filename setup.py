"""Where the packages lie: the shipped tables live at the top of a checkout, not inside the package."""

from setuptools import setup

setup(
    packages=["fewbit", "fewbit.schema", "fewbit.solver", "fewbit.tables"],
    package_dir={"fewbit": "fewbit", "fewbit.tables": "tables"},
    package_data={"fewbit.schema": ["*.json"], "fewbit.tables": ["*.json"]},
)
