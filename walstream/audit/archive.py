"""Object storage for closed segments, through fsspec. A copy counts once it was read back and is the same."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from walstream.errors import ConfigError

from .packing import Store

_BLOCK: Final = 4 * 1024 * 1024


def archive_at(url: str, options: Mapping[str, Any]) -> Store:
    """A function that copies a file to ``url``/<chain>/<name> and returns where it stands.

    Args:
        url: of a folder, such as ``s3://bucket/audit``.
        options: for the file system (fsspec's ``storage_options``).

    Raises:
        ConfigError: fsspec, or what it needs for such a URL, is not installed.
    """
    try:
        core: Any = importlib.import_module("fsspec.core")
        files, root = core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"the archive {url} cannot be used: {error}",
            hint="pip install 'walstream[archive]', and for S3 s3fs as well",
        ) from error
    protocol = url.partition("://")[0] if "://" in url else "file"

    def store(path: Path, chain: str) -> str:
        folder = f"{root.rstrip('/')}/{chain}"
        target = f"{folder}/{path.name}"
        wanted = _digest(path.open("rb"))
        files.makedirs(folder, exist_ok=True)
        files.put_file(str(path), target)
        if hasattr(files, "invalidate_cache"):
            files.invalidate_cache()
        if _digest(files.open(target, "rb")) != wanted:
            raise OSError(f"{target} is not what was uploaded")
        return f"{protocol}://{target}"

    return store


def _digest(file: Any) -> str:
    made = sha256()
    with file:
        while data := file.read(_BLOCK):
            made.update(data)
    return made.hexdigest()
