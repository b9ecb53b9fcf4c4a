"""The subcommands of `openv41`, one file each: `add_parser(subparsers)`, and `run(args)`, which returns the exit code.

Torch is imported when a command runs and not before, so that `--help` and `--version` answer at once. Three files are
no commands: `loading` opens the model, `reading` the texts, `output` writes.
"""
