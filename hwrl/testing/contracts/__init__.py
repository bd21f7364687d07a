"""What every backend promises, as pytest classes; :mod:`hwrl.testing.conformance` is where to import them from."""
