"""The command line, a file per command: `add(commands)` declares it, `run(arguments)` runs it."""
