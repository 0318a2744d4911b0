"""Programs that nobody vouches for, each in a process that sees nothing and leaves nothing."""
