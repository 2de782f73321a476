"""The metadata is in pyproject.toml; this file lets old tools install the package."""

from setuptools import setup

setup()
