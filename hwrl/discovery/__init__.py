"""Find backends and plugins: hooks, entry points, and the registry that chooses this process's backend."""

from hwrl.discovery.hookspecs import hookimpl as hookimpl
from hwrl.discovery.loading import LoadFailure as LoadFailure
from hwrl.discovery.loading import Plugin as Plugin
from hwrl.discovery.loading import PluginFault as PluginFault
from hwrl.discovery.loading import run_plugin_code as run_plugin_code
from hwrl.discovery.plugins import PLUGIN_ENTRY_POINTS as PLUGIN_ENTRY_POINTS
from hwrl.discovery.plugins import load_hook as load_hook
from hwrl.discovery.plugins import plugins_with_hook as plugins_with_hook
from hwrl.discovery.registry import BACKEND_ENTRY_POINTS as BACKEND_ENTRY_POINTS
from hwrl.discovery.registry import BACKEND_VARIABLE as BACKEND_VARIABLE
from hwrl.discovery.registry import Choice as Choice
from hwrl.discovery.registry import Probed as Probed
from hwrl.discovery.registry import Registry as Registry
from hwrl.discovery.registry import Survey as Survey
from hwrl.discovery.registry import backend_or_default as backend_or_default
from hwrl.discovery.registry import bootstrap as bootstrap
from hwrl.discovery.registry import engine_args as engine_args
from hwrl.discovery.registry import get_backend as get_backend
from hwrl.discovery.registry import host_backend as host_backend
from hwrl.discovery.registry import kernels as kernels
from hwrl.discovery.registry import process_env as process_env
from hwrl.discovery.registry import set_backend as set_backend
