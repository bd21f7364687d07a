"""The interfaces that backends, engines, transports and weight sources implement. Imports no torch."""
