"""`python -m bench NAME [options]` from a checkout."""

from bench.commands import main

if __name__ == "__main__":
    main(prog_name="python -m bench")
