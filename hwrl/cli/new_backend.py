"""``hwrl new-backend NAME``: write a package with a new backend."""

from hwrl.cli.packages import new_package_command
from hwrl.testing.levels import Kind

HELP, configure, run = new_package_command(Kind.BACKEND)
