"""The only place that reads the process environment; everything else is given a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_VARIABLE = "COMPACTION_PROXY_CONFIG"
DEFAULT_FILE = "proxy.yaml"


def process_environment() -> Mapping[str, str]:
    """A snapshot of the process environment."""
    return dict(os.environ)


def find_config(cli_value: str | Path | None, env: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """Which configuration file is meant: ``--config``, else ``COMPACTION_PROXY_CONFIG``, else ``./proxy.yaml``.

    A file that is named is returned even if it does not exist (loading it says so); ``proxy.yaml`` only if it exists.

    Args:
        cli_value: the value of ``--config``, if given.
        env: the environment.
        folder: where ``proxy.yaml`` is looked for; the working folder if ``None``.

    Returns:
        The path, or ``None``: the built-in configuration.
    """
    if cli_value is not None:
        return Path(cli_value)
    if named := env.get(CONFIG_VARIABLE):
        return Path(named)
    default = Path(DEFAULT_FILE) if folder is None else folder / DEFAULT_FILE
    return default if default.is_file() else None
