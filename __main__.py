"""``octavo`` and ``python -m octavo``: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run it, or say what to install."""
    try:
        from .engine.cli import main as run  # noqa: PLC0415  # its libraries belong to an extra
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'octavo[cli]'")
    run()


if __name__ == "__main__":
    main()
