"""The `kvtally` command. Each command lives in its own module and imports what it needs only when it runs."""
