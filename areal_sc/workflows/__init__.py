"""Episodes: the protocol, shipped workflows, and their numbers by which workers know them."""
