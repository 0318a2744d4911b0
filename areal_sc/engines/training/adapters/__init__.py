"""Low-rank adapters: their layers, and their files in the format of peft."""
