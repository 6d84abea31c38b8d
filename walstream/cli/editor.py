"""A text in the editor of the person at the terminal."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from walstream.errors import ConfigError


def edited(text: str, suffix: str) -> str:
    """``text`` as it was saved in the editor that ``$VISUAL`` or ``$EDITOR`` names, else ``vi``.

    Raises:
        ConfigError: the editor cannot be started, or failed, which is how a person leaves one without an answer.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="walstream-") as folder:  # only its owner can look into it
        file = Path(folder, f"edit{suffix}")
        file.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"the editor {editor!r} did not work: {error}", hint="set $EDITOR") from error
