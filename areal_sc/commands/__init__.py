"""What `python -m areal_sc COMMAND` can do: a module for each command.

`COMMAND` says what the command is, in the words of argparse; `add_arguments` adds what it takes;
`run` carries it out.
"""
