"""`python -m penstock` is the command, too."""

from penstock.cli import main

main()
