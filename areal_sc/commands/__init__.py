"""What `python -m areal_sc COMMAND` can do; a module for each command."""
