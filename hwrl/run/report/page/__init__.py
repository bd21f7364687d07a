"""The page of ``hwrl report``: one HTML file about a run, made from the files in the run directory."""

from hwrl.run.report.page.build import build_page

__all__ = ["build_page"]
