"""What the ranks of every training engine do alike: rows, groups, publication, files."""
