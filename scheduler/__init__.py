"""The command line, the driver loop, and everything that says Ray. Nothing imports this room."""
