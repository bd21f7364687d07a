"""``hwrl new-engine NAME``: write a package with a new rollout or train engine."""

from hwrl.cli.packages import new_package_command
from hwrl.testing.levels import Kind

HELP, configure, run = new_package_command(Kind.ROLLOUT_ENGINE, Kind.TRAIN_ENGINE)
