"""The command line, one file a command: `add(parser)` declares it, `run(arguments)` does it."""
