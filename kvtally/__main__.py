"""`python -m kvtally` is the `kvtally` command."""

from __future__ import annotations

from kvtally.cli.main import main

if __name__ == "__main__":
    main()
