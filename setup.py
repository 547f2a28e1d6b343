"""Names the packages of the wheel: mpissd, and analysis/ as mpissd.analysis."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["mpissd", "mpissd.*"]),
        *(f"mpissd.{name}" for name in find_packages(include=["analysis", "analysis.*"])),
    ],
    package_dir={"mpissd.analysis": "analysis"},
)
