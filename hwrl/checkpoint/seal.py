"""The last files of a draft, layout, extra state and manifest: :func:`seal`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.layout import Json, require_readable, write_torch_metadata
from hwrl.checkpoint.manifest import EXTRA_NAME, LAYOUT_NAME, MANIFEST_NAME, Manifest


def seal(fs: DurableFS, draft: Path, entries: Sequence[Json], extra: Json, manifest: Manifest) -> Manifest:
    """Add layout, extra state and manifest to a draft. Return the manifest as it was written.

    ``manifest`` lists the tensor files in the draft; this adds the other files that ``fs`` wrote or adopted there. When
    this returns, every file in the draft and its name in the draft are durable. Raises ValueError or TypeError if the
    result could not be resumed.
    """
    if manifest.nodes == 1:
        write_torch_metadata(fs, draft, entries)
    else:  # with a .metadata, torch's tools would take one node's part for the whole checkpoint
        require_readable(entries)
    for name, content in {LAYOUT_NAME: entries, EXTRA_NAME: extra}.items():
        fs.write_file(draft / name, json.dumps(content).encode())
    manifest = replace(manifest, files={**manifest.files, **fs.take_records(draft)})
    manifest_content = manifest.to_bytes()
    Manifest.from_bytes(manifest_content)  # raises if the manifest could not be read again
    fs.write_file(draft / MANIFEST_NAME, manifest_content)
    fs.take_records(draft)  # forget the manifest's own record
    for directory in [path for path in draft.rglob("*") if path.is_dir()] + [draft]:
        fs.sync_directory(directory)
    return manifest
