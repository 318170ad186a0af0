"""The command line around Hydra's: help, checks before any work, messages instead of tracebacks, exit codes.

Exit codes: 0 done, 1 the run failed, 2 the command asks for something that cannot be done, 128 + n ended by signal n.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestra import resume, validation
from orchestra.config import CONFIG_DIR, CONFIG_NAME, register_resolvers
from orchestra.errors import Interrupted, UsageError, answers_user, nearest

register_resolvers()

# Set in the processes that a distributed strategy starts: the first process has already checked everything.
_CHILD_PROCESS = "LOCAL_RANK"


def entry(main: Callable[[], Any]) -> None:
    """Run Hydra's `main` for `sys.argv`, after the checks, and exit with the right code."""
    # Hydra otherwise prints every exception itself and exits with 1; we say what happened and choose the code.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        arguments = get_args_parser().parse_args()
        if arguments.help:
            print(help_text())
            sys.exit(0)
        only_shows = arguments.cfg or arguments.info or arguments.shell_completion or arguments.hydra_help
        if not only_shows and _CHILD_PROCESS not in os.environ:
            overrides = resume.expand(arguments.overrides)
            for variation in single_runs(overrides) if arguments.multirun else [overrides]:
                config = compose_config(variation)
                validation.check(config)
                resume.check_unchanged(config)
            _replace_overrides(arguments.overrides, overrides)
        main()
    except Interrupted as signal:
        sys.exit(signal.exit_code)
    except Exception as error:
        sys.exit(_report(error))


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn errors that are answers into a message and exit code 2, before Hydra wraps them in words of its own."""
    try:
        yield
    except Exception as error:
        if not answers_user(error):
            raise
        sys.exit(_report(error))


def _report(error: Exception) -> int:
    if answers_user(error) or isinstance(error, HydraException):
        print(f"error: {error}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def _replace_overrides(old: list[str], new: list[str]) -> None:
    """Let Hydra, and the processes that a strategy starts, see the overrides that `resume` expanded."""
    if old != new:
        flags = [argument for argument in sys.argv[1:] if argument not in old]
        sys.argv[1:] = [*flags, *new]


# --- composing -------------------------------------------------------------------------------------------------------


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose one run's config without starting it.

    Raises:
        UsageError: an unknown group, option or key, or an override that does not parse, with the nearest valid names.
    """
    register_resolvers()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIR)):
            config = compose(CONFIG_NAME, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        raise UsageError(_missing_option(error)) from error
    except (OverrideParseException, ConfigCompositionException) as error:
        raise UsageError(_composition_problem(error, overrides)) from error
    except ValueError as error:  # such as trainer=null: a group takes the name of an option
        raise UsageError(str(error)) from error
    if config.get("module") is None or config.get("datamodule") is None:
        raise UsageError("Say which experiment to run: experiment=<name>. `python train.py --help` lists them.")
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.runtime.output_dir = config.hydra.run.dir  # what Hydra itself fills in when it starts the job
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    return config


def single_runs(overrides: list[str]) -> list[list[str]]:
    """The runs of a multirun that between them contain every swept value at least once (not their full product)."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    plain = [o.input_line for o in parsed if not o.is_sweep_override() and o.input_line is not None]
    swept = [list(o.sweep_string_iterator()) for o in parsed if o.is_discrete_sweep()]
    keys = [o.get_key_element() for o in parsed if o.is_discrete_sweep()]
    if not swept:
        return [plain]
    longest = max(len(values) for values in swept)
    return [
        plain + [f"{key}={values[min(i, len(values) - 1)]}" for key, values in zip(keys, swept, strict=True)]
        for i in range(longest)
    ]


def _missing_option(error: MissingConfigException) -> str:
    folder, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not folder:
        return str(error).splitlines()[0]
    group, _, subfolder = folder.partition("/")
    prefix = f"{subfolder}/" if subfolder else ""
    options = [prefix + path.stem for path in sorted((CONFIG_DIR / folder).glob("*.yaml"))]
    if not options:
        options = [
            path.relative_to(CONFIG_DIR / group).as_posix()[:-5] for path in (CONFIG_DIR / group).rglob("*.yaml")
        ]
    asked = prefix + option
    return f"{group}={asked} does not exist. {nearest(asked, options)}\nAvailable: {', '.join(sorted(options))}"


def _composition_problem(error: HydraException, overrides: list[str]) -> str:
    text = str(error)
    key = re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text)
    if key:
        given = key[1]
        others = [o for o in overrides if not o.lstrip("+~").startswith((f"{given}=", f"{given}@"))]
        name = getattr(error.__cause__, "full_key", None) or given  # inside a dict that was given, the key in it
        known = _siblings(compose_config(others), name) if len(others) < len(overrides) else []
        return f"{name} is not a known key. {nearest(name.rpartition('.')[2], known)} (+{name}=... adds a new one)"
    group = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
    if group:
        return f"{group[1]} is not a config group. {nearest(group[1], _groups())}"
    return text.split("\nSee https")[0].strip()


def _siblings(config: DictConfig, dotted: str) -> list[str]:
    """Names beside the first part of `dotted` that does not exist."""
    node: Any = config
    for part in dotted.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            break
        node = node[part]
    return [str(name) for name in node] if isinstance(node, DictConfig) else []


def _groups() -> list[str]:
    return [path.name for path in CONFIG_DIR.iterdir() if path.is_dir()]


# --- help ------------------------------------------------------------------------------------------------------------

_HELP = """\
Train, test and track a research method.

  python train.py experiment=<name> [key=value ...]
  python train.py -m experiment=<name> key=a,b,c      one run per value
  python train.py experiment=<name> --cfg job         print the composed config and stop

Experiments
{experiments}

Keys that every experiment has
  seed=0                  same seed, same numbers
  module={method}/<variant>  a baseline of the paper, or another size: {variants}
  datamodule=<name>       {datamodules}
  trainer=<name>          {trainers}
  scale=paper             the paper's full setting (default: small, minutes on two cores)
  debug=true              one batch of everything
  resume=<run>            continue a run, by MLflow run id or directory
  train=false checkpoint=<path>   test a checkpoint
  trainer.max_steps=..., trainer.precision=..., module.<key>=..., datamodule.<key>=...

Runs go to outputs/, metrics and figures to MLflow: mlflow ui --backend-store-uri sqlite:///mlflow.db
"""


def help_text() -> str:
    """What `--help` prints: the experiments with one line each, and the keys that all of them share."""
    experiments = []
    for path in sorted((CONFIG_DIR / "experiment").glob("*.yaml")):
        loaded = yaml.safe_load(path.read_text())
        experiments.append(f"  {path.stem:<28}{loaded['summary']}")
    method = "<method>"
    return _HELP.format(
        experiments="\n".join(experiments),
        method=method,
        variants="see conf/module/",
        datamodules=", ".join(_options("datamodule")),
        trainers=", ".join(name for name in _options("trainer") if name != "default"),
    )


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
