"""`python -m vanilla_transformer`, the same as the command `vanilla-transformer`."""

from vanilla_transformer.cli.main import main

if __name__ == "__main__":
    main()
