"""From YAML and words on a command line to checked dataclasses."""
