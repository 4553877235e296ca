"""The command `trivet`. Its modules import what is slow inside their functions, so that `--help` is quick."""
