"""Checks of a composed config before any work: unknown keys, wrong types, impossible values.

A node with a `_target_` is checked against the settings class `<Class>Config` in the `config` module of the
target's package (`modules.openmoe.module.OpenMoE` -> `modules.openmoe.config.OpenMoEConfig`). Settings classes are
pydantic models that import no heavy library, so a wrong value is answered in about a second. A target without one
is checked against the signature of the class or function itself, which costs its import.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.utils import get_class, get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from orchestra.config import RunConfig, TrainerConfig
from orchestra.errors import UsageError, nearest

# Keys that Hydra's `instantiate` reads itself.
_HYDRA_KEYS = {"_target_", "_args_", "_recursive_", "_convert_", "_partial_"}
_KNOWN_SETTINGS: dict[str, type[BaseModel]] = {"pytorch_lightning.Trainer": TrainerConfig}


def check(config: DictConfig) -> None:
    """Raise `UsageError` with every problem of `config`, one line each."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    problems = _all_problems({str(key): value for key, value in plain.items()})
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))


def _all_problems(plain: dict[str, Any]) -> list[str]:
    problems = list(_problems(RunConfig, plain, prefix=""))
    if plain["checkpoint"] is None and plain["train"]:
        problems += _objective_problems(plain)
    # What can be checked without heavy imports comes first, so that most mistakes are answered at once.
    described: list[tuple[str, dict[str, Any]]] = []
    others: list[tuple[str, dict[str, Any]]] = []
    for path, node in _targets(plain):
        (others if settings_class(node["_target_"]) is None else described).append((path, node))
    for nodes in (described, others):
        for path, node in nodes:
            problems += _target_problems(path, node)
        if problems:
            return problems
    return []


def settings_class(target: str) -> type[BaseModel] | None:
    """The settings class that describes `target`, or None when its package has none."""
    if target in _KNOWN_SETTINGS:
        return _KNOWN_SETTINGS[target]
    module_name, _, class_name = target.rpartition(".")
    package = module_name.rpartition(".")[0]
    if not package or not package.startswith(("modules", "datamodules", "orchestra")):
        return None
    try:
        if importlib.util.find_spec(f"{package}.config") is None:
            return None
    except ModuleNotFoundError:
        return None
    found = getattr(importlib.import_module(f"{package}.config"), f"{class_name}Config", None)
    return found if inspect.isclass(found) and issubclass(found, BaseModel) else None


def _targets(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, outermost first."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}[{index}]")


def _target_problems(path: str, node: Mapping[str, Any]) -> list[str]:
    target = node["_target_"]
    values = {k: v for k, v in node.items() if k not in _HYDRA_KEYS}
    settings = settings_class(target)
    if settings is not None:
        return list(_problems(settings, values, prefix=path))
    try:
        called = get_class(target) if target.rpartition(".")[2][:1].isupper() else get_object(target)
        signature = inspect.signature(called)
    except Exception as error:
        return [f"{path}._target_={target} cannot be imported: {error}"]
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return []
    names = [p.name for p in parameters if p.name != "self"]
    unknown = [key for key in values if key not in names]
    return [f"{path}.{key} is not an argument of {target}. {nearest(key, names)}" for key in unknown]


def _problems(model: type[BaseModel], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        # A union reports each of its members; the shortest path that names the key says it once.
        seen: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            path, message = _describe(model, item, prefix)
            seen.setdefault(path, []).append(message)
        for path, messages in seen.items():
            yield f"{path}{' or '.join(dict.fromkeys(messages))}"


def _describe(model: type[BaseModel], item: Any, prefix: str) -> tuple[str, str]:
    location = [str(part) for part in item["loc"] if not _is_union_label(part)]
    path = ".".join([prefix, *location] if prefix else location)
    given = item.get("input")
    match item["type"]:
        case "extra_forbidden":
            return (
                f"{path}={_short(given)}",
                f" is not a known key. {nearest(location[-1], _fields(model, location[:-1]))}",
            )
        case "missing":
            return path, " is missing"
        case "value_error":
            text = str(item["ctx"]["error"])
            return (f"{path}: " if path else ""), text
        case _:
            return f"{path}={_short(given)}", f": {_lower_first(item['msg'])}"


def _is_union_label(part: Any) -> bool:
    """Pydantic puts the tried member of a union into the location: `int`, `constrained-float`, `literal['auto']`."""
    text = str(part)
    return text in {"int", "float", "str", "bool", "none"} or "[" in text or text.startswith("constrained")


def _fields(model: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the (nested) model at `location`."""
    for part in location:
        annotation: Any = model.model_fields[part].annotation if part in model.model_fields else None
        if not (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _objective_problems(plain: Mapping[str, Any]) -> list[str]:
    trainer = plain["trainer"]
    objective = plain.get("objective") or {}
    metric = str(objective.get("metric", ""))
    problems = []
    if metric.startswith("val/") and trainer.get("limit_val_batches") == 0:
        problems.append(f"objective.metric={metric} needs validation, but trainer.limit_val_batches=0")
    if metric.startswith("test/") and not plain["test"]:
        problems.append(f"objective.metric={metric} needs the test stage, but test=false")
    return problems


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) and (not value or value != value.strip()) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
