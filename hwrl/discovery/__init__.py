"""Find backends and plugins: hooks, entry points, and the registry that chooses this process's backend."""

from hwrl.discovery.hookspecs import hookimpl
from hwrl.discovery.loading import LoadFailure, Plugin, PluginFault, run_plugin_code
from hwrl.discovery.plugins import PLUGIN_ENTRY_POINTS, load_hook, plugins_with_hook
from hwrl.discovery.registry import (
    BACKEND_ENTRY_POINTS,
    BACKEND_VARIABLE,
    Choice,
    Probed,
    Registry,
    Survey,
    backend_or_default,
    bootstrap,
    engine_args,
    get_backend,
    host_backend,
    kernels,
    process_env,
    set_backend,
)

__all__ = [
    "BACKEND_ENTRY_POINTS",
    "BACKEND_VARIABLE",
    "PLUGIN_ENTRY_POINTS",
    "Choice",
    "LoadFailure",
    "Plugin",
    "PluginFault",
    "Probed",
    "Registry",
    "Survey",
    "backend_or_default",
    "bootstrap",
    "engine_args",
    "get_backend",
    "hookimpl",
    "host_backend",
    "kernels",
    "load_hook",
    "plugins_with_hook",
    "process_env",
    "run_plugin_code",
    "set_backend",
]
