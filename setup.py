"""Everything is declared in setup.cfg; this file is for tools that ask for a setup.py."""

from setuptools import setup

setup()
