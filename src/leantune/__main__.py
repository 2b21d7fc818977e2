"""`python -m leantune` is `leantune`; torchrun starts it this way."""

from leantune.cli.main import main

raise SystemExit(main())
