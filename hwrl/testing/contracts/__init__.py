"""The contracts of every backend, as pytest classes; import them from :mod:`hwrl.testing.conformance`."""

import pkgutil

import pytest

# Here, so that pytest explains their assertions, whichever of them is imported first.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
