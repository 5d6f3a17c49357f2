"""Configuration: YAML files and the environment in, frozen :class:`Settings` out, or every problem at once."""

from compaction_proxy.config.environment import CONFIG_VARIABLE, find_config, process_environment
from compaction_proxy.config.load import load_settings, with_address
from compaction_proxy.config.reload import Reload, Watcher
from compaction_proxy.config.report import ConfigError, Mark, Problem
from compaction_proxy.config.settings import (
    ClientKey,
    ProviderSettings,
    RouteSettings,
    Secret,
    ServerSettings,
    Settings,
    StoreSettings,
    TelemetrySettings,
    Timeouts,
    match_route,
)

__all__ = [
    "CONFIG_VARIABLE",
    "ClientKey",
    "ConfigError",
    "Mark",
    "Problem",
    "ProviderSettings",
    "Reload",
    "RouteSettings",
    "Secret",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "TelemetrySettings",
    "Timeouts",
    "Watcher",
    "find_config",
    "load_settings",
    "match_route",
    "process_environment",
    "with_address",
]
