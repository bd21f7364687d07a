"""The configuration of a run: its keys, how it is read and checked, and how it is written."""

from hwrl.run.config.data import DataSetConfig as DataSetConfig
from hwrl.run.config.loading import RUN_CONFIG as RUN_CONFIG
from hwrl.run.config.loading import RUN_HEADER as RUN_HEADER
from hwrl.run.config.loading import dump_config as dump_config
from hwrl.run.config.loading import dump_run_config as dump_run_config
from hwrl.run.config.loading import load_config as load_config
from hwrl.run.config.loading import parse_config as parse_config
from hwrl.run.config.schema import Config as Config
from hwrl.run.config.sections import EMBEDDED as EMBEDDED
from hwrl.run.config.sections import FSDP as FSDP
from hwrl.run.config.values import MOST_PROCESSES as MOST_PROCESSES
from hwrl.run.config.values import Section as Section
