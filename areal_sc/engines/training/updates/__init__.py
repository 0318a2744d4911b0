"""What an update makes of rows: micro-batches, values of tokens, metrics, a trace."""
