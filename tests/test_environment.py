"""environment.yml and pyproject.toml say the same; no conda needed to check it."""

import re
import tomllib
from importlib import metadata

import pytest
import yaml
from needs import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PYPI_NAME = {
    "matplotlib-base": "matplotlib",
    "playwright-python": "playwright",
    "redis-py": "redis",
}  # conda-forge calls them otherwise
CONDA_ONLY = {"python", "pip"}
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def conda_bounds():
    """PyPI name -> bounds, for every conda line of environment.yml."""
    bounds = {}
    for line in ENVIRONMENT["dependencies"]:
        if isinstance(line, str):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*([<>!=~][^\s].*)?", line.strip())
            assert match, f"not a plain conda line: {line!r}"
            name, spec = match[1].lower(), (match[2] or "").replace(" ", "")
            spec = re.sub(r"(^|,)=(?!=)([\d.]+)(\.\*)?", r"\1==\2.*", spec)  # conda's =4.2 is pip's ==4.2.*
            bounds[PYPI_NAME.get(name, name)] = SpecifierSet(spec)
    return bounds


def project_bounds():
    extras = PROJECT["optional-dependencies"]
    lines = map(Requirement, PROJECT["dependencies"] + extras["course"] + extras["test"])
    return {line.name.lower(): line.specifier for line in lines}


def test_the_channels_are_conda_forge_alone():
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_pip_installs_nothing_but_the_checkout():
    (pip,) = [line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict)]
    assert pip == ["-e ."]


def test_python_has_the_same_bounds():
    assert conda_bounds()["python"] == SpecifierSet(PROJECT["requires-python"])


def test_names_and_bounds_are_those_of_base_course_and_test():
    conda = {name: spec for name, spec in conda_bounds().items() if name not in CONDA_ONLY}
    assert conda == project_bounds()


@pytest.mark.parametrize("name", [n for n in conda_bounds() if n not in CONDA_ONLY])
def test_this_environment_is_within_the_bounds(name):
    assert Version(metadata.version(name)) in conda_bounds()[name]


def test_the_versions_agree():
    import pagedkv

    assert pagedkv.__version__ == PROJECT["version"]
