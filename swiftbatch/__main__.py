"""`python -m swiftbatch`, the command `swiftbatch`."""

from swiftbatch.scheduler.__main__ import main

if __name__ == "__main__":
    main()
