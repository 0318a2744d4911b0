"""Bad input ends with its cause and its exit code, or is survived; never a hang."""
