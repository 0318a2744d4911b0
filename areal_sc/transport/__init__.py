"""The wire: RPC between processes, the tensor store of each worker, lazy pull between stores."""
