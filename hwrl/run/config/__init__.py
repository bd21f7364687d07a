"""The configuration of a run: its keys, how it is read and checked, and how it is written."""

from hwrl.run.config.data import DataSetConfig
from hwrl.run.config.loading import (
    RUN_CONFIG,
    RUN_HEADER,
    dump_config,
    dump_run_config,
    load_config,
    parse_config,
)
from hwrl.run.config.schema import Config
from hwrl.run.config.sections import EMBEDDED, FSDP
from hwrl.run.config.values import MOST_PROCESSES, Section

__all__ = [
    "EMBEDDED",
    "FSDP",
    "MOST_PROCESSES",
    "RUN_CONFIG",
    "RUN_HEADER",
    "Config",
    "DataSetConfig",
    "Section",
    "dump_config",
    "dump_run_config",
    "load_config",
    "parse_config",
]
