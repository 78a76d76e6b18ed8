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
PIP_ONLY = {"axe-playwright-python"}  # not looked for on conda-forge: pip brings it there too
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


def pip_lines():
    (pip,) = [line["pip"] for line in ENVIRONMENT["dependencies"] if isinstance(line, dict)]
    return pip


def pip_bounds():
    """Name -> bounds, for what pip installs beside the checkout."""
    lines = map(Requirement, (line for line in pip_lines() if not line.startswith("-e")))
    return {line.name.lower(): line.specifier for line in lines}


def project_bounds():
    extras = PROJECT["optional-dependencies"]
    lines = map(Requirement, PROJECT["dependencies"] + extras["course"] + extras["test"])
    return {line.name.lower(): line.specifier for line in lines}


def test_the_channels_are_conda_forge_alone():
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]


def test_pip_installs_the_checkout_and_little_else():
    assert pip_lines()[0] == "-e ."
    assert set(pip_bounds()) <= PIP_ONLY


def test_python_has_the_same_bounds():
    assert conda_bounds()["python"] == SpecifierSet(PROJECT["requires-python"])


def test_names_and_bounds_are_those_of_base_course_and_test():
    conda = {name: spec for name, spec in conda_bounds().items() if name not in CONDA_ONLY}
    assert conda | pip_bounds() == project_bounds()


@pytest.mark.parametrize("name", [n for n in conda_bounds() if n not in CONDA_ONLY])
def test_this_environment_is_within_the_bounds(name):
    assert Version(metadata.version(name)) in conda_bounds()[name]


def test_the_versions_agree():
    import pagedkv

    assert pagedkv.__version__ == PROJECT["version"]


# ---- Binder: repo2docker reads environment.yml if nothing comes before it


def test_repo2docker_finds_environment_yml_and_nothing_that_goes_before_it():
    assert ENVIRONMENT["name"] and isinstance(ENVIRONMENT["dependencies"], list)
    for first in ("binder", ".binder", "Dockerfile", "Project.toml", "REQUIRE", "install.R", "default.nix"):
        assert not (ROOT / first).exists(), f"{first} would be read instead of environment.yml"


def test_binder_gets_jupyterlab_and_what_the_checkout_is_built_from():
    assert "jupyterlab" in conda_bounds()  # the links ask for lab/tree/notebooks/…
    assert "pip" in ENVIRONMENT["dependencies"]
    for name in (PROJECT["readme"], *PROJECT["license-files"]):
        assert (ROOT / name).is_file(), f"{name} is named in pyproject.toml"


def test_links_to_binder_name_one_repository():
    from pagedkv.teach.site import BRANCH

    links = re.findall(
        r"mybinder\.org/(?:badge_logo|v2/gh/([\w.-]+/[\w.-]+)/([\w.-]+))", (ROOT / "README.md").read_text()
    )
    places = {place for place in links if place[0]}
    assert len(places) <= 1
    for _, branch in places:
        assert branch == BRANCH
