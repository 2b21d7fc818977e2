"""The order of the layers: imports go down only, and siblings do not know each other."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import leantune
from leantune.config.axes import Base, DdpStrategy, FsdpStrategy, Method, Strategy, TogetherMethod
from leantune.config.grid import BASES, METHODS, REFUSED, STRATEGIES
from leantune.config.schema import RunConfig
from leantune.methods import method_names, reft
from leantune.methods.together import TOGETHER

ROOT = Path(leantune.__file__).parent
LEVELS = {
    "errors": 0,
    "recipes": 0,
    "config": 0,
    "verbs": 0,
    "ops": 1,
    "models": 2,
    "bases": 3,
    "methods": 3,
    "strategies": 3,
    "data": 3,
    "checkpoint": 4,
    "train": 5,
    "generate": 5,
    "evaluate": 6,
    "serve": 6,
    "api": 7,
    "cli": 7,
}
# The package itself offers the verbs, and `python -m leantune` is the command line.
ABOVE_ALL = {"__init__", "__main__"}
# Configuration errors are errors; a package that is a verb finds its function when it is called; the
# command line is a shell around the functions.
ALLOWED = {("config", "errors"), ("verbs", "api"), ("cli", "api")}


def part_of(path: Path) -> str:
    """`train` for train/loop.py, `api` for api.py."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every module of leantune that a file imports, anywhere in it."""
    package = ".".join(["leantune", *path.relative_to(ROOT).parent.parts])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], base]
                ).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "leantune" else [base]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            names = [str(node.args[0].value)] if ast.unparse(node.func).endswith("import_module") else []
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "leantune")


SOURCES = sorted(ROOT.rglob("*.py"))


def test_every_part_of_the_package_has_a_level() -> None:
    assert {part_of(path) for path in SOURCES} <= LEVELS.keys() | ABOVE_ALL


def test_imports_go_down_and_never_sideways() -> None:
    found: list[str] = []
    for path in SOURCES:
        importer = part_of(path)
        if importer in ABOVE_ALL:
            continue
        for line, name in imported(path):
            part = name.split(".")[1] if "." in name else "__init__"
            if part == importer or (importer, part) in ALLOWED:
                continue
            if LEVELS.get(part, 99) >= LEVELS[importer]:
                found.append(f"{path.relative_to(ROOT)}:{line}: {importer} imports {name}")
    assert found == []


@pytest.mark.parametrize(
    "part", ["errors", "config", "verbs", "strategies/launch.py", "strategies/failure.py"]
)
def test_what_answers_at_once_imports_nothing_heavy_at_the_top(part: str) -> None:
    """A starting process must not pay for torch: it starts others that do."""
    place = ROOT / part
    files = (
        sorted(place.rglob("*.py"))
        if place.is_dir()
        else [place if place.suffix else place.with_suffix(".py")]
    )
    heavy: list[str] = []
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy += [
                f"{path.name}: {n}" for n in names if n.split(".")[0] in ("torch", "transformers", "datasets")
            ]
    assert heavy == []


def test_the_package_imports_its_verbs_lazily() -> None:
    """`import leantune` at the top level of the package may reach level 0 only."""
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    eager = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {str(name).split(".")[1] for name in eager if str(name).startswith("leantune.")} <= {
        "config",
        "errors",
    }


def names_in(union: Any) -> set[str]:
    """The `name` of every section in an annotated union."""
    (members, *_) = get_args(union)
    return {str(member.model_fields["name"].default) for member in get_args(members)}


def test_the_table_of_the_grid_the_schema_and_the_folders_agree() -> None:
    """A method that the schema offers but no file implements fails hours into a queue."""
    assert set(METHODS) == {*method_names(), TOGETHER} == names_in(Method)
    assert set(STRATEGIES) == names_in(Strategy)
    assert set(BASES) == names_in(Base)
    files = [path.stem for path in (ROOT / "bases").glob("*.py")]
    bases = {name for name in files if hasattr(importlib.import_module(f"leantune.bases.{name}"), "pack")}
    assert bases == set(BASES)
    strategies = {path.stem for path in (ROOT / "strategies").glob("*.py")}
    assert set(STRATEGIES) <= strategies


def file_of(method: str) -> Any:
    """The module that implements a method: the one of its name, or one that names it among several."""
    return reft if method in reft.METHODS else importlib.import_module(f"leantune.methods.{method}")


def test_every_value_of_an_axis_offers_what_the_run_calls() -> None:
    for name in method_names():
        assert callable(file_of(name).attach)
    for name in BASES:
        assert callable(importlib.import_module(f"leantune.bases.{name}").pack)
    for name in STRATEGIES:
        assert callable(importlib.import_module(f"leantune.strategies.{name}").place)


def settings_of(function: Any, told: set[str]) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name, without those that it is told by the code itself."""
    return {key: p for key, p in inspect.signature(function).parameters.items() if key not in told}


def check_defaults(section: Any, parameters: dict[str, inspect.Parameter]) -> None:
    """Every key of a section is a setting of its function, and has the same default."""
    for key in set(section.model_fields) - {"name"}:
        parameter, field = parameters[key], section.model_fields[key]
        default = None if field.default_factory else field.default
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == default, key


def sections_of(axis: Any) -> list[Any]:
    return [section for section in get_args(get_args(axis)[0]) if section is not TogetherMethod]


def test_the_settings_of_the_bases_are_those_of_the_code() -> None:
    """A key that the function does not take would crash; one the schema lacks cannot be set."""
    for section in sections_of(Base):
        base = importlib.import_module(f"leantune.bases.{section.model_fields['name'].default}")
        parameters = settings_of(base.pack, {"model", "leave"})
        assert set(section.model_fields) - {"name"} == set(parameters)
        check_defaults(section, parameters)


def test_the_settings_of_the_methods_are_those_of_the_code() -> None:
    """The same where one file serves several methods, some of which have fewer keys than others."""
    keys: dict[Any, set[str]] = {}
    for section in sections_of(Method):
        module = file_of(section.model_fields["name"].default)
        check_defaults(section, settings_of(module.attach, set()))
        keys.setdefault(module, set()).update(set(section.model_fields) - {"name"})
    for module, known in keys.items():
        told = {"model", "seed", "method", "markers"} if module is reft else {"model", "seed"}
        assert known == set(settings_of(module.attach, told)), module.__name__


def test_the_settings_of_sharding_are_those_of_the_code() -> None:
    """The same for the strategy that has settings of its own besides those of its processes."""
    place = importlib.import_module("leantune.strategies.fsdp").place
    parameters = set(inspect.signature(place).parameters)
    assert set(FsdpStrategy.model_fields) - set(DdpStrategy.model_fields) <= parameters
    told = {"model", "trainable", "world", "devices_per_node"}
    told |= {"new_parameters", "pinned", "gather_dtype"}
    assert parameters - told <= set(FsdpStrategy.model_fields)


def test_refused_cells_name_values_that_exist() -> None:
    for method, base, strategy in REFUSED:
        assert method in (*METHODS, "*")
        assert base in (*BASES, "*")
        assert strategy in (*STRATEGIES, "*")
    assert set(RunConfig.model_fields) >= {"method", "base", "strategy"}
